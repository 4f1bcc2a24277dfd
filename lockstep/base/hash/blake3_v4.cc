// Compiled for x86-64-v4: AVX-512.
#include "lockstep/base/hash/blake3_lanes.h"

namespace lockstep {
namespace {

struct Lanes {
  using Vector __attribute__((vector_size(64))) = std::uint32_t;
  static constexpr std::size_t kCount = 16;

  template <int kBits>
  static LOCKSTEP_INLINE Vector rotate(const Vector& x) {
    return (x >> kBits) | (x << (32 - kBits));
  }

  // Transposes 16 x 16 words: first inside quarters of 4 x 4, then the quarters. Each shuffle is
  // one instruction.
  static LOCKSTEP_INLINE void load(const std::byte* const* at, Vector* m) {
    Vector quarters[4][4];  // [q][w]: words w, w + 4, w + 8 and w + 12 of rows 4q to 4q + 3
    for (int q = 0; q < 4; ++q) {
      Vector r[4];
      for (int row = 0; row < 4; ++row) std::memcpy(&r[row], at[4 * q + row], sizeof(Vector));
      const Vector low01 = low_words(r[0], r[1]), high01 = high_words(r[0], r[1]);
      const Vector low23 = low_words(r[2], r[3]), high23 = high_words(r[2], r[3]);
      quarters[q][0] = low_pairs(low01, low23);
      quarters[q][1] = high_pairs(low01, low23);
      quarters[q][2] = low_pairs(high01, high23);
      quarters[q][3] = high_pairs(high01, high23);
    }
    for (int w = 0; w < 4; ++w) {
      const Vector even01 = even_quarters(quarters[0][w], quarters[1][w]);
      const Vector even23 = even_quarters(quarters[2][w], quarters[3][w]);
      const Vector odd01 = odd_quarters(quarters[0][w], quarters[1][w]);
      const Vector odd23 = odd_quarters(quarters[2][w], quarters[3][w]);
      m[w] = even_quarters(even01, even23);
      m[w + 4] = even_quarters(odd01, odd23);
      m[w + 8] = odd_quarters(even01, even23);
      m[w + 12] = odd_quarters(odd01, odd23);
    }
  }

  static LOCKSTEP_INLINE Vector low_words(const Vector& a, const Vector& b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
  }
  static LOCKSTEP_INLINE Vector high_words(const Vector& a, const Vector& b) {
    return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15,
                                   31);
  }
  static LOCKSTEP_INLINE Vector low_pairs(const Vector& a, const Vector& b) {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
  }
  static LOCKSTEP_INLINE Vector high_pairs(const Vector& a, const Vector& b) {
    return __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30,
                                   31);
  }
  static LOCKSTEP_INLINE Vector even_quarters(const Vector& a, const Vector& b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
  }
  static LOCKSTEP_INLINE Vector odd_quarters(const Vector& a, const Vector& b) {
    return __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30,
                                   31);
  }
};

}  // namespace

void blake3_row_v4(const Blake3Row& row) {
  for (std::size_t i = 0; i < row.count; i += Lanes::kCount) hash_lanes<Lanes>(row, i);
}

}  // namespace lockstep
