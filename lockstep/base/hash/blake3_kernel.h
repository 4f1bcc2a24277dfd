#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep {

// What BLAKE3's files share; callers want blake3.h. The names are those of the specification.

inline constexpr std::size_t kBlake3BlockBytes = 64;
inline constexpr std::uint32_t kBlake3Iv[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                               0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

inline constexpr std::uint32_t kBlake3ChunkStart = 1;
inline constexpr std::uint32_t kBlake3ChunkEnd = 2;
inline constexpr std::uint32_t kBlake3Parent = 4;
inline constexpr std::uint32_t kBlake3Root = 8;
inline constexpr std::uint32_t kBlake3Keyed = 16;

// A row of whole chunks or of parent nodes, one after another in memory, none of them the root.
struct Blake3Row {
  const std::byte* input;
  std::size_t count;         // at least 1
  std::size_t blocks;        // of each: 16 in a chunk, 1 in a parent
  const std::uint32_t* key;  // 8 words
  std::uint64_t counter;     // of the first chunk; parents have none
  std::uint32_t flags;       // of every block
  std::uint32_t* output;     // 8 words for each; may not overlap the input
};

// One way to hash rows.
struct Blake3Kernel {
  const char* name;
  void (*hash_row)(const Blake3Row& row);
};

void blake3_row_portable(const Blake3Row& row);
void blake3_row_v3(const Blake3Row& row);
void blake3_row_v4(const Blake3Row& row);

// One block of `length` bytes, padded with zeros to 64. Turns `value` into the next chaining value.
void blake3_compress(std::uint32_t* value, const std::byte* block, std::uint64_t counter,
                     std::uint32_t length, std::uint32_t flags);

// Those that this processor can run, the fastest first, the portable one last.
std::span<const Blake3Kernel> blake3_kernels();

}  // namespace lockstep
