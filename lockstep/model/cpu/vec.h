// Vectors of the widest kind that the including file is compiled for, for the *_impl.h of this
// folder. All of it has internal linkage: an inline function shared between files of different
// instruction sets could be the one copy that the linker keeps for everybody.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

// gcc 12 takes its own headers' _mm512_undefined_ps() for a mistake of ours.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

namespace lockstep {
namespace {

#if defined(__AVX512F__)

constexpr std::size_t kWidth = 16;
using Vec = __m512;

inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline __mmask16 first(std::size_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
// The first n < kWidth elements; the others are read as `rest` and not written.
inline Vec load_part(const float* p, std::size_t n, Vec rest) {
  return _mm512_mask_loadu_ps(rest, first(n), p);
}
inline void store_part(float* p, std::size_t n, Vec v) { _mm512_mask_storeu_ps(p, first(n), v); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
inline Vec sqrt(Vec v) { return _mm512_sqrt_ps(v); }
// The second when either is NaN.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
// value where a >= b, else 0; `value` where either is NaN.
inline Vec keep_unless_less(Vec a, Vec b, Vec value) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), value);
}
// 2^n, n a small integer in the low bits of `bits` viewed as an integer.
inline Vec power_of_two(Vec bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(bits), 23));
}

#elif defined(__AVX2__)

constexpr std::size_t kWidth = 8;
using Vec = __m256;

inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline __m256i first(std::size_t n) {
  const __m256i places = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), places);
}
inline Vec load_part(const float* p, std::size_t n, Vec rest) {
  return _mm256_blendv_ps(rest, _mm256_maskload_ps(p, first(n)), _mm256_castsi256_ps(first(n)));
}
inline void store_part(float* p, std::size_t n, Vec v) { _mm256_maskstore_ps(p, first(n), v); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
inline Vec sqrt(Vec v) { return _mm256_sqrt_ps(v); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec keep_unless_less(Vec a, Vec b, Vec value) {
  return _mm256_and_ps(_mm256_cmp_ps(a, b, _CMP_NLT_UQ), value);
}
inline Vec power_of_two(Vec bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(bits), 23));
}

#else

constexpr std::size_t kWidth = 4;
using Vec [[gnu::vector_size(16)]] = float;
using Bits [[gnu::vector_size(16)]] = std::int32_t;

inline Vec set1(float x) { return Vec{x, x, x, x}; }
inline Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
inline Vec load_part(const float* p, std::size_t n, Vec rest) {
  for (std::size_t i = 0; i < n; ++i) rest[i] = p[i];
  return rest;
}
inline void store_part(float* p, std::size_t n, Vec v) {
  for (std::size_t i = 0; i < n; ++i) p[i] = v[i];
}
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec fnma(Vec a, Vec b, Vec c) { return c - a * b; }
inline Vec sqrt(Vec v) {
  for (std::size_t i = 0; i < kWidth; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
}
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
inline Vec keep_unless_less(Vec a, Vec b, Vec value) { return (Vec)((Bits)value & ~(Bits)(a < b)); }
inline Vec power_of_two(Vec bits) { return (Vec)((Bits)bits << 23); }

#endif

// The sum has a fixed order: the halves are added until one element is left.
#ifdef __AVX2__

inline float sum_of(__m128 v) {
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}
inline float sum_of(__m256 v) {
  return sum_of(_mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)));
}
inline float max_of(__m128 v) {
  v = _mm_max_ps(_mm_movehl_ps(v, v), v);
  return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(v), v));
}
inline float max_of(__m256 v) {
  return max_of(_mm_max_ps(_mm256_extractf128_ps(v, 1), _mm256_castps256_ps128(v)));
}
#ifdef __AVX512F__
inline float sum_of(__m512 v) {
  return sum_of(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
}
inline float max_of(__m512 v) {
  return max_of(_mm256_max_ps(_mm512_extractf32x8_ps(v, 1), _mm512_castps512_ps256(v)));
}
#endif

#else

inline float sum_of(Vec v) {
  alignas(64) float part[kWidth];
  store(part, v);
  for (std::size_t half = kWidth / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) part[i] += part[i + half];
  }
  return part[0];
}

inline float max_of(Vec v) {
  alignas(64) float part[kWidth];
  store(part, v);
  float most = part[0];
  for (std::size_t i = 1; i < kWidth; ++i) most = most < part[i] ? part[i] : most;
  return most;
}

#endif

// e^x with a relative error below 2^-23; exactly 1 at 0, 0 below -87.3, e^88 above 88; NaN stays
// NaN.
inline Vec exp(Vec x) {
  constexpr float kLowest = -87.33654f;  // whose power is the smallest normal number
  constexpr float kShift = 12582912.0f + 127.0f;
  const Vec bounded = min(set1(88.0f), max(set1(kLowest), x));
  // Adding 1.5 * 2^23 rounds to an integer n, which then stands in the low bits, biased as
  // exponents are. ln 2 is taken in two parts, the first of which has few digits.
  const Vec shifted = fma(bounded, set1(1.44269504f), set1(kShift));
  const Vec n = shifted - set1(kShift);
  const Vec r = fnma(n, set1(-2.12194440e-4f), fnma(n, set1(0.693359375f), bounded));
  // 1 + r + r^2 * p(r): p has the least relative error on |r| <= ln 2 / 2.
  Vec p = set1(1.3814539988e-3f);
  p = fma(p, r, set1(8.3687451164e-3f));
  p = fma(p, r, set1(4.1668390787e-2f));
  p = fma(p, r, set1(1.6666520399e-1f));
  p = fma(p, r, set1(4.9999993432e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  return keep_unless_less(x, set1(kLowest), p * power_of_two(shifted));
}

// Calls whole(i) for every whole vector of `width` elements, and part(i, n) for the n that are
// left.
template <typename Whole, typename Part>
inline void for_vectors(std::size_t width, Whole&& whole, Part&& part) {
  std::size_t i = 0;
  for (; i + kWidth <= width; i += kWidth) whole(i);
  if (i < width) part(i, width - i);
}

// A row in vectors: load and store hide the tail, whose missing elements are 0.
struct Row {
  std::size_t width;

  template <typename Body>
  void each(Body&& body) const {
    for_vectors(
        width,
        [&](std::size_t i) {
          body([i](const float* p) { return load(p + i); },
               [i](float* p, Vec v) { store(p + i, v); });
        },
        [&](std::size_t i, std::size_t n) {
          body([i, n](const float* p) { return load_part(p + i, n, set1(0.0f)); },
               [i, n](float* p, Vec v) { store_part(p + i, n, v); });
        });
  }
};

}  // namespace
}  // namespace lockstep
