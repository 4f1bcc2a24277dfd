#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "lockstep/wire/plane_code.h"

namespace lockstep {

// Numbers of a vector have exponents that are nearly alike, so the byte that holds most of a
// number's exponent takes few values. The compressed form has these bytes in a Huffman code and all
// others as they are: 27 bits for the 32 of a gradient's element, 11 for 16 in bf16. Nothing is
// lost, whatever the bytes are. The format is in docs/mesh_protocol.md. Pure.

inline constexpr std::size_t kMostCompressed =
    kMostPlaneWords * kPlaneWord;  // plain bytes, at once

class Compressor {
 public:
  // The compressed form, which the next call overwrites. Empty: it would save less than a
  // sixteenth.
  std::span<const std::byte> compress(std::span<const std::byte> plain);

 private:
  std::vector<std::byte> out_;
};

class Decompressor {
 public:
  // False: this is no compressed form of so many bytes; `plain` then holds anything.
  [[nodiscard]] bool decompress(std::span<const std::byte> compressed, std::span<std::byte> plain);

 private:
  PlaneTable table_;
};

}  // namespace lockstep
