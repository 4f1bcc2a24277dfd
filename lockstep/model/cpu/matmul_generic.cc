#include <cstddef>

namespace lockstep {
namespace {

// Four floats, in a register where the processor has such; product and sum are rounded one by one.
struct Vec {
  static constexpr std::size_t kLanes = 4;
  typedef float Four __attribute__((vector_size(16)));
  Four value;

  static Vec zero() { return {Four{}}; }
  static Vec load(const float* from) {
    Vec loaded;
    __builtin_memcpy(&loaded.value, from, sizeof loaded.value);
    return loaded;
  }
  static Vec broadcast(const float* from) { return {Four{*from, *from, *from, *from}}; }
  static Vec multiply_add(Vec a, Vec b, Vec c) { return {c.value + a.value * b.value}; }
  static Vec add(Vec a, Vec b) { return {a.value + b.value}; }
  void store(float* to) const { __builtin_memcpy(to, &value, sizeof value); }

  // `rows` rows of kLanes become columns.
  static void transpose(const float* from, std::size_t from_stride, std::size_t rows, float* to,
                        std::size_t to_stride) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      for (std::size_t j = 0; j < rows; ++j) to[i * to_stride + j] = from[j * from_stride + i];
    }
  }
};

constexpr std::size_t kStripRows = 4;
constexpr bool kFetchSource = false;

}  // namespace
}  // namespace lockstep

#define LOCKSTEP_MATMUL_KERNEL kMatmulGeneric
#define LOCKSTEP_MATMUL_NAME "generic"
#include "lockstep/model/cpu/matmul_impl.h"
