// Internal to the files of this folder that are compiled for AVX-512; internal linkage for the
// reason that vec.h gives.
#pragma once

#include <immintrin.h>

#include <cstddef>

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

}  // namespace
}  // namespace lockstep
