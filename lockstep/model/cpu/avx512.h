// What the files of this folder that are compiled for AVX-512 share; internal linkage for the
// reason that vec.h gives.
#pragma once

// gcc 12 takes the undefined operand inside its own intrinsics for ours.
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace lockstep {
namespace {

// Rows become columns: pairs of rows, fours within 128 bits, then the 128-bit parts.
inline void transpose16(__m512 (&rows)[16]) {
  __m512 fours[16];
#pragma GCC unroll 4
  for (std::size_t i = 0; i < 16; i += 4) {
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i], rows[i + 1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i], rows[i + 1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i + 2], rows[i + 3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i + 2], rows[i + 3]));
    fours[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    fours[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    fours[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    fours[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
#pragma GCC unroll 4
  for (std::size_t i = 0; i < 4; ++i) {
    const __m512 a = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0xdd);
    rows[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    rows[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    rows[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    rows[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

// Eight tiles of 16 rows of 64 bytes: what a thread loads before it uses them.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Before and after tiles are used: gcc 12 does not know that they are loaded from memory.
inline void all_memory_is_used() { asm volatile("" ::: "memory"); }

}  // namespace
}  // namespace lockstep
