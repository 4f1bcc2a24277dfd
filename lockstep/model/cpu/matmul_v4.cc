#include "lockstep/model/cpu/avx512.h"

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

  // `rows` rows of kLanes become columns. Always stores whole vectors, in order, so that they may
  // overlap.
  static void transpose(const float* from, std::size_t from_stride, std::size_t rows, float* to,
                        std::size_t to_stride) {
    __m512 square[16];
    for (std::size_t i = 0; i < 16; ++i) {
      square[i] = i < rows ? _mm512_loadu_ps(from + i * from_stride) : _mm512_setzero_ps();
    }
    transpose16(square);
    for (std::size_t i = 0; i < 16; ++i) _mm512_storeu_ps(to + i * to_stride, square[i]);
  }
};

constexpr std::size_t kStripRows = 14;  // 28 of 32 registers hold sums
constexpr bool kFetchSource = true;

}  // namespace
}  // namespace lockstep

#define LOCKSTEP_MATMUL_KERNEL kMatmulV4
#define LOCKSTEP_MATMUL_NAME "x86-64-v4"
#include "lockstep/model/cpu/matmul_impl.h"
