#include "lockstep/files/hashed_read.h"

#include <algorithm>
#include <vector>

#include "lockstep/base/check.h"
#include "lockstep/base/cores.h"
#include "lockstep/base/index.h"
#include "lockstep/base/thread_pool.h"

namespace lockstep {
namespace {

constexpr std::size_t kMostReaders = 8;  // more than disks can use
constexpr std::size_t kBlock = 1 << 20;
// What is read at once, so that it is still in the second cache when it is hashed.
constexpr std::size_t kReadAtOnce = 256 << 10;
// Neighbouring blocks that a thread reads one after the other, where there are enough. Two threads
// that touch the same new huge page first would both clear one.
constexpr std::size_t kMostBlocksInRow = 16;
constexpr std::size_t kRowsPerThread = 4;  // so that all end at about the same time

}  // namespace

void BlockReader::read_to(std::span<std::byte> place) {
  LOCKSTEP_CHECK(place.size() <= end_ - at_);
  while (!place.empty()) {
    // Ends where a chunk of the hash does, wherever the place begins.
    const auto part = place.first(std::min(place.size(), kReadAtOnce - at_ % kReadAtOnce));
    read_(at_, part);
    hash_.update(part);
    at_ += part.size();
    place = place.subspan(part.size());
  }
}

void BlockReader::skip_to(std::uint64_t position) {
  LOCKSTEP_CHECK(position >= at_ && position <= end_);
  while (at_ < position) {
    read_to(scratch_.first(std::min<std::uint64_t>(position - at_, kReadAtOnce)));
  }
}

std::span<const std::byte> BlockReader::read_rest(std::size_t ahead) {
  LOCKSTEP_CHECK(ahead <= kMostAhead);
  const std::size_t left = end_ - at_;
  const auto after =
      scratch_.subspan(left).first(std::min<std::uint64_t>(ahead, input_bytes_ - end_));
  read_to(scratch_.first(left));
  if (!after.empty()) read_(end_, after);
  return scratch_.first(left + after.size());
}

Blake3Hash read_and_hash(std::uint64_t bytes, const ReadAt& read,
                         const std::function<void(BlockReader& block)>& body) {
  Blake3Pieces hash(bytes, kBlock);
  const auto cores = index_of(available_cores());
  ThreadPool pool(static_cast<int>(std::min({cores, kMostReaders, hash.pieces()})));
  std::vector<std::vector<std::byte>> scratch(index_of(pool.threads()));
  for (auto& each : scratch) {
    each.resize(std::min<std::uint64_t>(bytes, kBlock + BlockReader::kMostAhead));
  }
  const auto read_block = [&](std::size_t index, std::size_t worker) {
    const std::uint64_t position = std::uint64_t{index} * kBlock;
    Blake3 own = hash.begin(index);
    BlockReader block(bytes, position, std::min<std::uint64_t>(bytes - position, kBlock), read, own,
                      scratch[worker]);
    if (body) body(block);
    block.skip_to(block.end());
    hash.end(index, own);
  };
  const std::size_t row = std::clamp<std::size_t>(hash.pieces() / (kRowsPerThread * scratch.size()),
                                                  1, kMostBlocksInRow);
  pool.run((hash.pieces() + row - 1) / row, [&](std::size_t index, int worker) {
    const std::size_t end = std::min(hash.pieces(), (index + 1) * row);
    for (std::size_t block = index * row; block < end; ++block) {
      read_block(block, index_of(worker));
    }
  });
  return hash.finish();
}

}  // namespace lockstep
