#include "lockstep/base/hash/blake3.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "lockstep/base/check.h"
#include "lockstep/base/hash/blake3_kernel.h"

namespace lockstep {
namespace {

static_assert(std::endian::native == std::endian::little, "words are copied as they lie in memory");

constexpr std::array<std::uint32_t, 8> kIv = std::to_array(kBlake3Iv);
constexpr std::size_t kBlocksPerChunk = 16;
// More take more memory and save no time.
constexpr std::size_t kMostChunksAtOnce = 256;

int digit(char character) {
  if (character >= '0' && character <= '9') return character - '0';
  if (character >= 'a' && character <= 'f') return character - 'a' + 10;
  return -1;
}

}  // namespace

Blake3::Blake3() : Blake3(blake3_kernels().front()) {}

Blake3::Blake3(const Blake3Kernel& kernel) : Blake3(kernel, kIv, 0) {}

Blake3::Blake3(const Blake3Kernel& kernel, const ChainingValue& key, std::uint32_t flags,
               std::uint64_t first_chunk)
    : kernel_(&kernel), key_(key), flags_(flags), first_chunk_(first_chunk), chunks_(first_chunk) {}

Blake3 Blake3::keyed(std::span<const std::byte, 32> key) {
  return keyed(key, blake3_kernels().front());
}

Blake3 Blake3::keyed(std::span<const std::byte, 32> key, const Blake3Kernel& kernel) {
  ChainingValue words;
  std::memcpy(words.data(), key.data(), sizeof(words));
  return Blake3(kernel, words, kBlake3Keyed);
}

void Blake3::update(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (buffered_ == kChunkBytes) {
      push(hash_buffer(0));
      ++chunks_;
      buffered_ = 0;
    }
    merge_complete_subtrees();
    const std::size_t chunks = buffered_ == 0 ? chunks_at_once(bytes.size()) : 0;
    std::size_t taken = chunks * kChunkBytes;
    if (chunks > 1) {
      hash_chunks(bytes.data(), chunks);
    } else {
      taken = std::min(kChunkBytes - buffered_, bytes.size());
      std::memcpy(&buffer_[buffered_], bytes.data(), taken);
      buffered_ += taken;
    }
    bytes = bytes.subspan(taken);
  }
}

// Called when more input is certain, so that what is merged here is not the root. Complete subtrees
// are as the ones in the binary number of chunks.
void Blake3::merge_complete_subtrees() {
  while (subtree_count_ > static_cast<std::size_t>(std::popcount(chunks_ - first_chunk_))) {
    const auto& right = subtrees_[subtree_count_ - 1];
    auto& left = subtrees_[subtree_count_ - 2];
    left = hash_parent(left, right, 0);
    --subtree_count_;
  }
}

// How many whole chunks of the next `bytes` bytes are hashed as one row: never more than up to the
// next multiple of kMostChunksAtOnce, so that the row after it can be one large subtree.
std::size_t Blake3::chunks_at_once(std::size_t bytes) const {
  return std::min<std::size_t>(bytes / kChunkBytes,
                               kMostChunksAtOnce - chunks_ % kMostChunksAtOnce);
}

// At least two. All lanes work wherever the row starts; then it falls into complete subtrees.
void Blake3::hash_chunks(const std::byte* bytes, std::size_t chunks) {
  std::array<ChainingValue, kMostChunksAtOnce> values;
  kernel_->hash_row({.input = bytes,
                     .count = chunks,
                     .blocks = kBlocksPerChunk,
                     .key = key_.data(),
                     .counter = chunks_,
                     .flags = flags_,
                     .output = values.front().data()});
  for (std::size_t at = 0; at < chunks;) {
    std::size_t size = std::bit_floor(chunks - at);
    while (chunks_ % size != 0) size /= 2;
    merge_complete_subtrees();
    push_subtree(std::span(values).subspan(at, size));
    at += size;
  }
}

// Leaves both halves on the stack: if the input ends here, their parent is the root.
void Blake3::push_subtree(std::span<const ChainingValue> chunks) {
  std::array<ChainingValue, kMostChunksAtOnce / 2> first, second;
  const ChainingValue* children = chunks.data();
  auto* parents = &first;
  auto* spare = &second;
  for (std::size_t count = chunks.size() / 2; count > 1; count /= 2) {
    kernel_->hash_row({.input = reinterpret_cast<const std::byte*>(children),
                       .count = count,
                       .blocks = 1,
                       .key = key_.data(),
                       .counter = 0,
                       .flags = flags_ | kBlake3Parent,
                       .output = parents->front().data()});
    children = parents->data();
    std::swap(parents, spare);
  }
  push(children[0]);
  if (chunks.size() > 1) push(children[1]);
  chunks_ += chunks.size();
}

Blake3::ChainingValue Blake3::hash_buffer(std::uint32_t root) const {
  ChainingValue value = key_;
  std::uint32_t flags = flags_ | kBlake3ChunkStart;
  std::size_t at = 0;
  for (; buffered_ - at > kBlake3BlockBytes; at += kBlake3BlockBytes) {
    blake3_compress(value.data(), &buffer_[at], chunks_, kBlake3BlockBytes, flags);
    flags = flags_;
  }
  blake3_compress(value.data(), &buffer_[at], chunks_, static_cast<std::uint32_t>(buffered_ - at),
                  flags | kBlake3ChunkEnd | root);
  return value;
}

Blake3::ChainingValue Blake3::hash_parent(const ChainingValue& left, const ChainingValue& right,
                                          std::uint32_t root) const {
  const std::array<ChainingValue, 2> children{left, right};
  ChainingValue value = key_;
  blake3_compress(value.data(), reinterpret_cast<const std::byte*>(children.data()), 0,
                  kBlake3BlockBytes, flags_ | kBlake3Parent | root);
  return value;
}

Blake3Hash Blake3::finish() const { return std::bit_cast<Blake3Hash>(tree_value(kBlake3Root)); }

Blake3::ChainingValue Blake3::tree_value(std::uint32_t root) const {
  if (chunks_ == first_chunk_) return hash_buffer(root);
  // An empty buffer follows a row of chunks, which left at least two values.
  std::size_t left = subtree_count_;
  ChainingValue value = buffered_ > 0 ? hash_buffer(0) : subtrees_[--left];
  while (left > 0) {
    --left;
    value = hash_parent(subtrees_[left], value, left == 0 ? root : 0);
  }
  return value;
}

// A piece is a complete subtree, so the tree over pieces has the shape of the tree over chunks.
Blake3Pieces::Blake3Pieces(std::uint64_t bytes, std::size_t piece_bytes)
    : bytes_(bytes),
      piece_bytes_(piece_bytes),
      values_(std::max<std::size_t>(1, (bytes + piece_bytes - 1) / piece_bytes)) {
  LOCKSTEP_CHECK(std::has_single_bit(piece_bytes) && piece_bytes >= Blake3::kChunkBytes);
}

Blake3 Blake3Pieces::begin(std::size_t index) const {
  return {blake3_kernels().front(), kIv, 0, index * (piece_bytes_ / Blake3::kChunkBytes)};
}

void Blake3Pieces::end(std::size_t index, const Blake3& hasher) {
  const std::uint64_t before = std::uint64_t{index} * piece_bytes_;
  const std::uint64_t had =
      (hasher.chunks_ - hasher.first_chunk_) * Blake3::kChunkBytes + hasher.buffered_;
  LOCKSTEP_CHECK(had == std::min<std::uint64_t>(piece_bytes_, bytes_ - before));
  values_[index] = hasher.tree_value(pieces() == 1 ? kBlake3Root : 0);
}

void Blake3Pieces::update(std::size_t index, std::span<const std::byte> piece) {
  Blake3 hasher = begin(index);
  hasher.update(piece);
  end(index, hasher);
}

Blake3Hash Blake3Pieces::finish() const {
  return std::bit_cast<Blake3Hash>(merged(0, pieces(), kBlake3Root));
}

// The left subtree is the largest complete one that leaves something for the right.
Blake3Pieces::ChainingValue Blake3Pieces::merged(std::size_t begin, std::size_t end,
                                                 std::uint32_t root) const {
  if (end - begin == 1) return values_[begin];
  const std::size_t middle = begin + std::bit_floor(end - begin - 1);
  return Blake3().hash_parent(merged(begin, middle, 0), merged(middle, end, 0), root);
}

Blake3Hash blake3(std::span<const std::byte> bytes) {
  Blake3 hasher;
  hasher.update(bytes);
  return hasher.finish();
}

std::string to_hex(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const std::byte byte : bytes) {
    text += kDigits[std::to_integer<unsigned>(byte >> 4)];
    text += kDigits[std::to_integer<unsigned>(byte & std::byte{15})];
  }
  return text;
}

std::optional<Blake3Hash> parse_hash(std::string_view text) {
  Blake3Hash hash{};
  if (text.size() != 2 * hash.size()) return std::nullopt;
  for (std::size_t i = 0; i < hash.size(); ++i) {
    const int high = digit(text[2 * i]);
    const int low = digit(text[2 * i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    hash[i] = static_cast<std::byte>(high * 16 + low);
  }
  return hash;
}

}  // namespace lockstep
