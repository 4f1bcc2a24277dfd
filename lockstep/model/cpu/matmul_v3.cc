#include <immintrin.h>

#include <cstddef>

namespace lockstep {
namespace {

struct Vec {
  static constexpr std::size_t kLanes = 8;
  __m256 value;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static Vec broadcast(const float* from) { return {_mm256_broadcast_ss(from)}; }
  static Vec multiply_add(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.value, b.value, c.value)};
  }
  static Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.value, b.value)}; }
  void store(float* to) const { _mm256_storeu_ps(to, value); }

  // `rows` rows of kLanes become columns: pairs of rows, fours within 128 bits, then the halves.
  // Always stores whole vectors, in order, so that they may overlap.
  static void transpose(const float* from, std::size_t from_stride, std::size_t rows, float* to,
                        std::size_t to_stride) {
    __m256 in[8];
    __m256 fours[8];
    for (std::size_t i = 0; i < 8; ++i) {
      in[i] = i < rows ? _mm256_loadu_ps(from + i * from_stride) : _mm256_setzero_ps();
    }
    for (std::size_t i = 0; i < 8; i += 4) {
      const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(in[i], in[i + 1]));
      const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(in[i], in[i + 1]));
      const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(in[i + 2], in[i + 3]));
      const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(in[i + 2], in[i + 3]));
      fours[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
      fours[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
      fours[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
      fours[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
    }
    for (std::size_t i = 0; i < 4; ++i) {
      _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
    }
    for (std::size_t i = 0; i < 4; ++i) {
      _mm256_storeu_ps(to + (i + 4) * to_stride,
                       _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
    }
  }
};

constexpr std::size_t kStripRows = 6;  // 12 of 16 registers hold sums
constexpr bool kFetchSource = false;   // costs a narrow tile more than it gains

}  // namespace
}  // namespace lockstep

#define LOCKSTEP_MATMUL_KERNEL kMatmulV3
#define LOCKSTEP_MATMUL_NAME "x86-64-v3"
#include "lockstep/model/cpu/matmul_impl.h"
