#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep {

// CRC-32C (Castagnoli) of `bytes`. A message in pieces: pass the result of the piece before.
// Uses the processor's instruction where it has one.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0);

// The same, and copies the bytes to `to` in the same pass; the two do not overlap.
std::uint32_t crc32c_copy(std::byte* to, std::span<const std::byte> bytes,
                          std::uint32_t before = 0);

// As crc32c, with plain instructions only.
std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t before = 0);

}  // namespace lockstep
