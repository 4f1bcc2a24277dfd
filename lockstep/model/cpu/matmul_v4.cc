// gcc 12 takes the undefined operand inside its own intrinsics for ours.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstddef>

namespace lockstep {
namespace {

struct Vec {
  static constexpr std::size_t kLanes = 16;
  __m512 value;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec load(const float* from) { return {_mm512_loadu_ps(from)}; }
  static Vec broadcast(const float* from) { return {_mm512_set1_ps(*from)}; }
  static Vec multiply_add(Vec a, Vec b, Vec c) {
    return {_mm512_fmadd_ps(a.value, b.value, c.value)};
  }
  static Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.value, b.value)}; }
  void store(float* to) const { _mm512_storeu_ps(to, value); }

  // `rows` rows of kLanes become columns: pairs of rows, fours within 128 bits, then the 128-bit
  // parts. Always stores whole vectors, in order, so that they may overlap.
  static void transpose(const float* from, std::size_t from_stride, std::size_t rows, float* to,
                        std::size_t to_stride) {
    __m512 in[16];
    __m512 fours[16];
    __m512 out[16];
    for (std::size_t i = 0; i < 16; ++i) {
      in[i] = i < rows ? _mm512_loadu_ps(from + i * from_stride) : _mm512_setzero_ps();
    }
    for (std::size_t i = 0; i < 16; i += 4) {
      const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(in[i], in[i + 1]));
      const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(in[i], in[i + 1]));
      const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(in[i + 2], in[i + 3]));
      const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(in[i + 2], in[i + 3]));
      fours[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
      fours[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
      fours[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
      fours[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    for (std::size_t i = 0; i < 4; ++i) {
      const __m512 a = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0x88);
      const __m512 b = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0xdd);
      const __m512 c = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0x88);
      const __m512 d = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0xdd);
      out[i] = _mm512_shuffle_f32x4(a, c, 0x88);
      out[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
      out[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
      out[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
    for (std::size_t i = 0; i < 16; ++i) _mm512_storeu_ps(to + i * to_stride, out[i]);
  }
};

constexpr std::size_t kStripRows = 14;  // 28 of 32 registers hold sums

}  // namespace
}  // namespace lockstep

#define LOCKSTEP_MATMUL_KERNEL kMatmulV4
#define LOCKSTEP_MATMUL_NAME "x86-64-v4"
#include "lockstep/model/cpu/matmul_impl.h"
