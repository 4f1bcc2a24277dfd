#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "lockstep/wire/bytes.h"

namespace lockstep {

// Every fourth byte of a piece of memory, a *plane*, as a Huffman code: the code itself, then four
// *streams* of bits, each of a quarter of the plane, so that a processor reads several at a time.
// docs/mesh_protocol.md has the format. Pure.

inline constexpr std::size_t kPlaneWord = 4;  // bytes from one of a plane to the next
inline constexpr std::size_t kMostPlaneWords = 4096;
inline constexpr int kLongestCode = 11;  // bits

// What write_plane() writes at most: code, sizes, streams, and the few bytes behind them that it
// spoils.
inline constexpr std::size_t kMostPlaneBytes = 1024 + kMostPlaneWords * kLongestCode / 8;

// Returns the end of what it wrote.
std::byte* write_plane(const std::byte* plane, std::size_t words, std::byte* to);

// What the next bits of a stream say.
struct PlaneTable {
  struct Entry {
    std::uint8_t value;
    std::uint8_t length;  // of its code
  };
  std::array<Entry, std::size_t{1} << kLongestCode> entries;
};

// Makes `table` for its own use. False: this is no plane of so many words; `plane` then holds
// anything.
[[nodiscard]] bool read_plane(ByteReader& reader, std::size_t words, PlaneTable& table,
                              std::byte* plane);

}  // namespace lockstep
