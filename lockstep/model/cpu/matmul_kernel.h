#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/model/cpu/matmul.h"

namespace lockstep {

// Internal to matmul*.cc and their test: the inner loops of matrix products, once per instruction
// set.
//
// A strip is a few rows of a, a panel a few columns of b, both over one block of the depth and
// copied into an order that the inner loop reads from front to back. A tile is the part of the
// result that one strip and one panel give; its sums stay in registers.

// The longest block of the depth. Part of the result: sums are rounded per block.
constexpr std::size_t kMaxDepthBlock = 512;

struct MatmulKernel {
  const char* name;
  Precision precision;
  std::size_t strip_rows;
  std::size_t panel_cols;
  std::size_t strip_floats;  // size of a strip, and of a panel, in floats
  std::size_t panel_floats;

  // Copies a(row.., k..) with `rows` <= strip_rows and `depth` <= kMaxDepthBlock.
  void (*pack_strip)(const Operand& a, std::size_t row, std::size_t rows, std::size_t k,
                     std::size_t depth, float* strip);
  // Copies b(k.., col..) with `cols` <= panel_cols.
  void (*pack_panel)(const Operand& b, std::size_t k, std::size_t depth, std::size_t col,
                     std::size_t cols, float* panel);
  // out = strip · panel, or add + strip · panel; `out` and `add` have the same stride. `transposed`
  // is that of a: it decides the order within a strip.
  void (*multiply)(const float* strip, bool transposed, const float* panel, std::size_t depth,
                   std::size_t rows, std::size_t cols, float* out, const float* add,
                   std::size_t stride);
};

extern const MatmulKernel kMatmulGeneric;
extern const MatmulKernel kMatmulV3;  // defined for x86-64 only, as is the next
extern const MatmulKernel kMatmulV4;

// What this processor can run for `precision`, the fastest first.
std::vector<const MatmulKernel*> supported_kernels(Precision precision);

}  // namespace lockstep
