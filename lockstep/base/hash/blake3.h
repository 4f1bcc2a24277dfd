#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

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
  static constexpr std::size_t kChunkBytes = 1024;
  // The depth of the largest tree, and one for two halves that are not merged yet.
  static constexpr std::size_t kMostSubtrees = 55;
  using ChainingValue = std::array<std::uint32_t, 8>;

  Blake3(const Blake3Kernel& kernel, const ChainingValue& key, std::uint32_t flags);

  void push(const ChainingValue& value) { subtrees_[subtree_count_++] = value; }
  void merge_complete_subtrees();
  std::size_t subtree_chunks(std::size_t bytes) const;
  void hash_subtree(const std::byte* bytes, std::size_t chunks);
  ChainingValue hash_buffer(std::uint32_t root) const;
  ChainingValue hash_parent(const ChainingValue& left, const ChainingValue& right,
                            std::uint32_t root) const;

  const Blake3Kernel* kernel_;
  ChainingValue key_;
  std::uint32_t flags_;
  std::uint64_t chunks_ = 0;  // in the subtrees; the buffer holds the chunk after them
  std::size_t subtree_count_ = 0;
  std::size_t buffered_ = 0;
  std::array<ChainingValue, kMostSubtrees> subtrees_;  // left to right
  std::array<std::byte, kChunkBytes> buffer_;
};

Blake3Hash blake3(std::span<const std::byte> bytes);

// Two lower-case digits per byte.
std::string to_hex(std::span<const std::byte> bytes);

}  // namespace lockstep
