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

// Part of the depth: [k, k + depth), at most kMaxDepthBlock.
struct DepthBlock {
  std::size_t k, depth;
};

constexpr std::size_t kMaxStrips = 32;

// The rows [row, row + rows) cut evenly into at most kMaxStrips: strip s begins at
// row + s * rows / strips.
struct RowBlock {
  std::size_t row, rows, strips;
};

// Lines of the cache: line i begins at data[i % (1 << shift) * near + (i >> shift) * far].
struct Lines {
  const float* data;
  std::size_t near, far;
  unsigned shift;
};

// Where a tile goes; `add` may be null or `out`.
struct TileOut {
  float* out;
  const float* add;
  std::size_t stride;
  // Asked for on the way, ahead_step floats per k: what the next tiles will need.
  const float* ahead;
  std::size_t ahead_step;
  // As well, one line for every four k: what the next strips will be copied from.
  Lines source;
};

struct MatmulKernel {
  const char* name;
  Precision precision;
  std::size_t strip_rows;  // at most so many in a strip
  std::size_t panel_cols;
  std::size_t strip_floats;  // the memory of a strip, and of a panel
  std::size_t panel_floats;

  // Copies the strips of `rows`, which lie one after the other; `all_rows` is the height of a.
  void (*pack_strips)(const Operand& a, std::size_t all_rows, const RowBlock& rows,
                      const DepthBlock& depth, float* strips);
  // Copies [col, col + cols) into panels that lie one after the other.
  void (*pack_panels)(const Operand& b, std::size_t col, std::size_t cols, const DepthBlock& depth,
                      float* panels);
  // One tile of rows <= strip_rows, cols <= panel_cols.
  void (*multiply)(const float* strip, const float* panel, std::size_t depth, std::size_t rows,
                   std::size_t cols, const TileOut& to);
};

extern const MatmulKernel kMatmulGeneric;
extern const MatmulKernel kMatmulV3;  // defined for x86-64 only, as are the next
extern const MatmulKernel kMatmulV4;
extern const MatmulKernel kMatmulAmx;

// What this processor can run for `precision`, the fastest first.
std::vector<const MatmulKernel*> supported_kernels(Precision precision);

// The fastest of them; throws Error{kInvalidArgument} where there is none.
const MatmulKernel& best_kernel(Precision precision);

}  // namespace lockstep
