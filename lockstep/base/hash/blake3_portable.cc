#include "lockstep/base/hash/blake3_lanes.h"
#include "lockstep/base/processor.h"

namespace lockstep {
namespace {

template <int kBits, typename V>
LOCKSTEP_INLINE V rotate_right(const V& x) {
  return (x >> kBits) | (x << (32 - kBits));
}

// Four words are a vector on every processor we know; elsewhere the compiler takes it apart.
struct Lanes {
  using Vector __attribute__((vector_size(16))) = std::uint32_t;
  static constexpr std::size_t kCount = 4;

  template <int kBits>
  static LOCKSTEP_INLINE Vector rotate(const Vector& x) {
    return rotate_right<kBits>(x);
  }

  static LOCKSTEP_INLINE void load(const std::byte* const* at, Vector* m) {
    for (int w = 0; w < 16; w += 4) {
      Vector r[4];
      for (int row = 0; row < 4; ++row) std::memcpy(&r[row], at[row] + 4 * w, sizeof(Vector));
      const Vector low01 = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
      const Vector low23 = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
      const Vector high01 = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
      const Vector high23 = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
      m[w] = __builtin_shufflevector(low01, low23, 0, 1, 4, 5);
      m[w + 1] = __builtin_shufflevector(low01, low23, 2, 3, 6, 7);
      m[w + 2] = __builtin_shufflevector(high01, high23, 0, 1, 4, 5);
      m[w + 3] = __builtin_shufflevector(high01, high23, 2, 3, 6, 7);
    }
  }
};

struct Scalar {
  template <int kBits>
  static LOCKSTEP_INLINE std::uint32_t rotate(std::uint32_t x) {
    return rotate_right<kBits>(x);
  }
};

#ifdef __x86_64__
constexpr Blake3Kernel kKernels[] = {
    {"avx512", blake3_row_v4}, {"avx2", blake3_row_v3}, {"portable", blake3_row_portable}};
#else
constexpr Blake3Kernel kKernels[] = {{"portable", blake3_row_portable}};
#endif

}  // namespace

void blake3_row_portable(const Blake3Row& row) {
  for (std::size_t i = 0; i < row.count; i += Lanes::kCount) hash_lanes<Lanes>(row, i);
}

void blake3_compress(std::uint32_t* value, const std::byte* block, std::uint64_t counter,
                     std::uint32_t length, std::uint32_t flags) {
  std::uint32_t words[16] = {};
  std::memcpy(words, block, length);
  compress<Scalar>(value, words, static_cast<std::uint32_t>(counter),
                   static_cast<std::uint32_t>(counter >> 32), length, flags);
}

std::span<const Blake3Kernel> blake3_kernels() {
  static const std::size_t usable = 1 + (runs_x86_64_v3() ? 1 : 0) + (runs_x86_64_v4() ? 1 : 0);
  return std::span(kKernels).last(usable);
}

}  // namespace lockstep
