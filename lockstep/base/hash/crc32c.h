#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lockstep {

// CRC-32C (Castagnoli) of `bytes`. A message in pieces: pass the result of the piece before.
// Uses the processor's instruction where it has one.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0);

// The same with plain instructions only.
std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t before = 0);

}  // namespace lockstep
