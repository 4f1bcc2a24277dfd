// Compiled for x86-64-v3: AVX2.
#include <immintrin.h>

#include "lockstep/base/hash/blake3_lanes.h"

namespace lockstep {
namespace {

struct Lanes {
  using Vector __attribute__((vector_size(32))) = std::uint32_t;
  static constexpr std::size_t kCount = 8;

  // Whole bytes move in one shuffle; other rotations take two shifts.
  template <int kBits>
  static LOCKSTEP_INLINE Vector rotate(const Vector& x) {
    if constexpr (kBits == 16) {
      return shuffle(x, _mm_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    } else if constexpr (kBits == 8) {
      return shuffle(x, _mm_setr_epi8(1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8, 13, 14, 15, 12));
    } else {
      return (x >> kBits) | (x << (32 - kBits));
    }
  }
  static LOCKSTEP_INLINE Vector shuffle(const Vector& x, __m128i order) {
    return (Vector)_mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(order));
  }

  // Four words of row `low` beside the same four words of row `high`.
  static LOCKSTEP_INLINE __m256i pair(const std::byte* low, const std::byte* high) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(words),
                                   _mm_loadu_si128(reinterpret_cast<const __m128i*>(high)), 1);
  }

  // Transposes two blocks of 4 x 4 words at a time.
  static LOCKSTEP_INLINE void load(const std::byte* const* at, Vector* m) {
    for (int w = 0; w < 16; w += 4) {
      const __m256i r0 = pair(at[0] + 4 * w, at[4] + 4 * w);
      const __m256i r1 = pair(at[1] + 4 * w, at[5] + 4 * w);
      const __m256i r2 = pair(at[2] + 4 * w, at[6] + 4 * w);
      const __m256i r3 = pair(at[3] + 4 * w, at[7] + 4 * w);
      const __m256i low01 = _mm256_unpacklo_epi32(r0, r1), high01 = _mm256_unpackhi_epi32(r0, r1);
      const __m256i low23 = _mm256_unpacklo_epi32(r2, r3), high23 = _mm256_unpackhi_epi32(r2, r3);
      m[w] = (Vector)_mm256_unpacklo_epi64(low01, low23);
      m[w + 1] = (Vector)_mm256_unpackhi_epi64(low01, low23);
      m[w + 2] = (Vector)_mm256_unpacklo_epi64(high01, high23);
      m[w + 3] = (Vector)_mm256_unpackhi_epi64(high01, high23);
    }
  }
};

}  // namespace

void blake3_row_v3(const Blake3Row& row) {
  for (std::size_t i = 0; i < row.count; i += Lanes::kCount) hash_lanes<Lanes>(row, i);
}

}  // namespace lockstep
