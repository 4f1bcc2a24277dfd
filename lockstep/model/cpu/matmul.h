#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/base/float_buffer.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/model/config.h"

namespace lockstep {

// Whether this processor has instructions for the products of `precision`.
bool supports(Precision precision);

// A matrix in memory: element (row, col) is data[row * stride + col], or data[col * stride + row]
// when `transposed`. Any alignment.
struct Operand {
  const float* data;
  std::size_t stride;
  bool transposed = false;
};

// out = a · b, or out = add + a · b. With x (tokens x in) and w (out x in), row-major:
//   y = x·wᵀ    a = {x, in}         b = {w, in, true}
//   dx = dy·w   a = {dy, out}       b = {w, in}
//   dw = dyᵀ·x  a = {dy, out, true} b = {x, in}
struct Product {
  std::size_t rows, cols, depth;
  Operand a;   // rows x depth
  Operand b;   // depth x cols
  float* out;  // rows x cols, overlaps neither a nor b
  std::size_t out_stride;
  const float* add = nullptr;  // strided as `out`, and may be `out` itself
};

struct MatmulKernel;

// Matrix products on a pool. An element of the result depends on its row of a, its column of b, its
// `add` and the depth, to the bit: not on its place, on the other rows and columns or on the
// threads. Depth is summed in blocks of at most 512; in f32 each begins at 0, so that rounding
// errors stay small.
class Matmul {
 public:
  // Throws Error{kInvalidArgument} when the processor has no instructions for `precision`.
  Matmul(ThreadPool& pool, Precision precision);
  // With the inner loops of a given instruction set, for tests and measurements.
  Matmul(ThreadPool& pool, const MatmulKernel& kernel);

  Precision precision() const;

  // One product, computed by the whole pool; not to be called by a body of ThreadPool::run. Scratch
  // memory grows to what the largest product needs and is kept.
  void operator()(const Product& product);

 private:
  struct Scratch {
    FloatBuffer strips;
    FloatBuffer panel;
  };

  ThreadPool& pool_;
  const MatmulKernel& kernel_;
  FloatBuffer panels_;  // of the product under way
  std::vector<Scratch> workers_;
};

}  // namespace lockstep
