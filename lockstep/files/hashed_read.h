#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "lockstep/base/hash/blake3.h"

namespace lockstep {

// Fills a span from a position of an input.
using ReadAt = std::function<void(std::uint64_t position, std::span<std::byte> into)>;

// A block of an input that one thread reads: in order, each byte once. What is read is hashed while
// it is in the cache.
class BlockReader {
 public:
  BlockReader(std::uint64_t input_bytes, std::uint64_t position, std::size_t size,
              const ReadAt& read, Blake3& hash, std::span<std::byte> scratch)
      : input_bytes_(input_bytes),
        end_(position + size),
        at_(position),
        read_(read),
        hash_(hash),
        scratch_(scratch) {}

  // What is left of the block: [at, end) of the input.
  std::uint64_t at() const { return at_; }
  std::uint64_t end() const { return end_; }

  // The next bytes, straight to where they belong.
  void read_to(std::span<std::byte> place);
  // The next bytes, which only the hash is to see.
  void skip_to(std::uint64_t position);
  // All that is left of the block, and up to `ahead` bytes after it, at most kMostAhead; those are
  // not hashed here. Valid as long as the reader.
  static constexpr std::size_t kMostAhead = 64 << 10;
  std::span<const std::byte> read_rest(std::size_t ahead = 0);

 private:
  const std::uint64_t input_bytes_;
  const std::uint64_t end_;
  std::uint64_t at_;
  const ReadAt& read_;
  Blake3& hash_;
  const std::span<std::byte> scratch_;
};

// Reads an input of `bytes` bytes in blocks of one mebibyte, in any order, on as many threads as
// there are cores, up to eight; returns the BLAKE3 of the whole. `body` gets every block and reads
// what it wants of it; the rest is read for the hash. `read` and `body` are called on several
// threads at once. What they throw ends the reading and reaches the caller.
Blake3Hash read_and_hash(std::uint64_t bytes, const ReadAt& read,
                         const std::function<void(BlockReader& block)>& body = {});

}  // namespace lockstep
