#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

struct Blake3Kernel;

using Blake3Hash = std::array<std::byte, 32>;

// BLAKE3, hashed or keyed, with 32 bytes of output. Copyable; one thread at a time.
// Pieces of 16 KiB and more given to update() are hashed many chunks at once.
class Blake3 {
 public:
  Blake3();
  static Blake3 keyed(std::span<const std::byte, 32> key);

  // With an instruction set of the caller's choice; the others take the best there is.
  explicit Blake3(const Blake3Kernel& kernel);
  static Blake3 keyed(std::span<const std::byte, 32> key, const Blake3Kernel& kernel);

  void update(std::span<const std::byte> bytes);
  // The hash of everything so far; more may follow.
  Blake3Hash finish() const;

 private:
  friend class Blake3Pieces;
  static constexpr std::size_t kChunkBytes = 1024;
  // The depth of the largest tree, and one for two halves that are not merged yet.
  static constexpr std::size_t kMostSubtrees = 55;
  using ChainingValue = std::array<std::uint32_t, 8>;

  Blake3(const Blake3Kernel& kernel, const ChainingValue& key, std::uint32_t flags,
         std::uint64_t first_chunk = 0);

  void push(const ChainingValue& value) { subtrees_[subtree_count_++] = value; }
  void merge_complete_subtrees();
  std::size_t chunks_at_once(std::size_t bytes) const;
  void hash_chunks(const std::byte* bytes, std::size_t chunks);
  void push_subtree(std::span<const ChainingValue> chunks);
  // The value of the whole tree; `root` is the flag of a root, or 0 for a subtree.
  ChainingValue tree_value(std::uint32_t root) const;
  ChainingValue hash_buffer(std::uint32_t root) const;
  ChainingValue hash_parent(const ChainingValue& left, const ChainingValue& right,
                            std::uint32_t root) const;

  const Blake3Kernel* kernel_;
  ChainingValue key_;
  std::uint32_t flags_;
  std::uint64_t first_chunk_;  // where this part of the input begins
  std::uint64_t chunks_;       // up to the end of the subtrees; the buffer holds the one after them
  std::size_t subtree_count_ = 0;
  std::size_t buffered_ = 0;
  std::array<ChainingValue, kMostSubtrees> subtrees_;  // left to right
  std::array<std::byte, kChunkBytes> buffer_;
};

// The same hash of an input whose pieces come in any order, on any thread.
class Blake3Pieces {
 public:
  // `piece_bytes` is a power of two, at least 1024.
  Blake3Pieces(std::uint64_t bytes, std::size_t piece_bytes);

  std::size_t pieces() const { return values_.size(); }
  // Of piece `index`: the bytes from index * piece_bytes on. All but the last are whole.
  Blake3 begin(std::size_t index) const;
  // The hasher of begin(), when it has had the whole piece. Each piece ends once.
  void end(std::size_t index, const Blake3& hasher);
  void update(std::size_t index, std::span<const std::byte> piece);
  // When all pieces have ended.
  Blake3Hash finish() const;

 private:
  using ChainingValue = Blake3::ChainingValue;
  ChainingValue merged(std::size_t begin, std::size_t end, std::uint32_t root) const;

  const std::uint64_t bytes_;
  const std::size_t piece_bytes_;
  std::vector<ChainingValue> values_;
};

Blake3Hash blake3(std::span<const std::byte> bytes);

// Two lower-case digits per byte.
std::string to_hex(std::span<const std::byte> bytes);
// A hash in that form; nothing for other text.
std::optional<Blake3Hash> parse_hash(std::string_view text);

}  // namespace lockstep
