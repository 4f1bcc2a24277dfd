#pragma once

#include <cstdint>

namespace lockstep {

// Whether this process may use the matrix unit (AMX) with bf16. The system is asked for it once.
bool amx_bf16_available();

// Eight tiles of 16 rows of 64 bytes: what a thread loads before it uses them.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

}  // namespace lockstep
