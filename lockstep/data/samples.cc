#include "lockstep/data/samples.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/wire/bytes.h"

namespace lockstep {

Samples::Samples(std::vector<TokenShard> shards, std::uint32_t vocab, int context)
    : vocab_(vocab), context_(context) {
  LOCKSTEP_CHECK(context > 0);
  for (TokenShard& shard : shards) {
    if (shard.size() > 0) count_ += (shard.size() - 1) / static_cast<std::uint64_t>(context);
    runs_.push_back({std::move(shard), 0, count_});
  }
}

void Samples::read(std::uint64_t sample, std::span<std::int32_t> tokens,
                   std::span<std::int32_t> targets) const {
  const auto length = static_cast<std::size_t>(context_);
  LOCKSTEP_CHECK(sample < count_ && tokens.size() == length && targets.size() == length);
  const auto run = std::ranges::upper_bound(runs_, sample, {}, &Run::end);
  const std::uint64_t before = run == runs_.begin() ? 0 : std::prev(run)->end;
  run->shard.copy_sample((run->first + sample - before) * length, vocab_, tokens, targets);
}

Blake3Hash Samples::fingerprint() const {
  ByteWriter text;
  text.u64(static_cast<std::uint64_t>(context_));
  for (const Run& run : runs_) {
    text.u64(run.first);
    text.u64(run.end);
    text.u64(run.shard.size());
    text.bytes(run.shard.payload().get());
  }
  return blake3(text.written());
}

std::vector<TokenShard> Samples::shards() const {
  std::vector<TokenShard> shards;
  for (const Run& run : runs_) shards.push_back(run.shard);
  return shards;
}

Samples Samples::slice(std::uint64_t first, std::uint64_t count) const {
  LOCKSTEP_CHECK(first <= count_ && count <= count_ - first);
  Samples part({}, vocab_, context_);
  std::uint64_t begin = 0;  // of the run
  for (const Run& run : runs_) {
    const std::uint64_t from = std::max(begin, first);
    const std::uint64_t to = std::min(run.end, first + count);
    if (from < to) {
      part.count_ += to - from;
      part.runs_.push_back({run.shard, run.first + from - begin, part.count_});
    }
    begin = run.end;
  }
  return part;
}

void Samples::append(const Samples& more) {
  LOCKSTEP_CHECK(more.vocab_ == vocab_ && more.context_ == context_);
  for (const Run& run : more.runs_) {
    runs_.push_back({run.shard, run.first, count_ + run.end});
  }
  count_ += more.count_;
}

}  // namespace lockstep
