// The f32 loops of matmul_kernel.h. Each matmul_*.cc defines Vec (a vector of kLanes floats with
// load, store, broadcast, multiply_add, add and transpose), kStripRows, LOCKSTEP_MATMUL_KERNEL and
// LOCKSTEP_MATMUL_NAME, all in the anonymous namespace, and includes this file once.
//
// Nothing here calls an inline function of another header: such a function, compiled here for a new
// processor, could be the one copy that the linker keeps for everybody.
#pragma once

#include <cstddef>
#include <utility>

#include "lockstep/model/cpu/matmul_kernel.h"

namespace lockstep {
namespace {

constexpr std::size_t kLanes = Vec::kLanes;
constexpr std::size_t kPanelCols = 2 * kLanes;

// Rows of a strip lie one after the other; the odd distance keeps them out of each other's cache
// sets. A strip of a transposed matrix has the rows of one k side by side.
constexpr std::size_t kStripStride = kMaxDepthBlock + 16;

void pack_strip(const Operand& a, std::size_t row, std::size_t rows, std::size_t k,
                std::size_t depth, float* strip) {
  if (a.transposed) {
    const float* source = a.data + k * a.stride + row;
    if (rows == kStripRows) {
      for (std::size_t i = 0; i < depth; ++i) {
        __builtin_memcpy(strip + i * kStripRows, source + i * a.stride, kStripRows * sizeof(float));
      }
    } else {
      for (std::size_t i = 0; i < depth; ++i) {
        for (std::size_t j = 0; j < rows; ++j) strip[i * kStripRows + j] = source[i * a.stride + j];
      }
    }
  } else {
    const float* source = a.data + row * a.stride + k;
    for (std::size_t j = 0; j < rows; ++j) {
      __builtin_memcpy(strip + j * kStripStride, source + j * a.stride, depth * sizeof(float));
    }
  }
}

void pack_panel(const Operand& b, std::size_t k, std::size_t depth, std::size_t col,
                std::size_t cols, float* panel) {
  std::size_t done = 0;
  if (b.transposed) {
    const float* source = b.data + col * b.stride + k;
    if (cols == kPanelCols) {
      for (; done + kLanes <= depth; done += kLanes) {
        Vec::transpose(source + done, b.stride, panel + done * kPanelCols, kPanelCols);
        Vec::transpose(source + kLanes * b.stride + done, b.stride,
                       panel + done * kPanelCols + kLanes, kPanelCols);
      }
    }
    for (; done < depth; ++done) {
      float* line = panel + done * kPanelCols;
      for (std::size_t j = 0; j < kPanelCols; ++j) {
        line[j] = j < cols ? source[j * b.stride + done] : 0.0F;
      }
    }
    return;
  }
  const float* source = b.data + k * b.stride + col;
  if (cols == kPanelCols) {
    for (; done < depth; ++done) {
      Vec::load(source + done * b.stride).store(panel + done * kPanelCols);
      Vec::load(source + done * b.stride + kLanes).store(panel + done * kPanelCols + kLanes);
    }
  }
  for (; done < depth; ++done) {
    float* line = panel + done * kPanelCols;
    for (std::size_t j = 0; j < kPanelCols; ++j) {
      line[j] = j < cols ? source[done * b.stride + j] : 0.0F;
    }
  }
}

// One tile of Rows rows and all columns of the panel.
template <std::size_t Rows, bool Transposed>
void multiply_tile(const float* strip, const float* panel, std::size_t depth, float* out,
                   const float* add, std::size_t stride) {
  constexpr std::size_t kRowStep = Transposed ? 1 : kStripStride;
  constexpr std::size_t kDepthStep = Transposed ? kStripRows : 1;
  Vec sums[Rows][2];
  for (std::size_t i = 0; i < Rows; ++i) {
    sums[i][0] = Vec::zero();
    sums[i][1] = Vec::zero();
    // The rows of the result are far apart; they arrive while the sums are computed.
    __builtin_prefetch(out + i * stride, 1);
    __builtin_prefetch(out + i * stride + kLanes, 1);
  }
  for (std::size_t k = 0; k < depth; ++k) {
    const Vec left = Vec::load(panel);
    const Vec right = Vec::load(panel + kLanes);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < Rows; ++i) {
      const Vec factor = Vec::broadcast(strip + i * kRowStep);
      sums[i][0] = Vec::multiply_add(factor, left, sums[i][0]);
      sums[i][1] = Vec::multiply_add(factor, right, sums[i][1]);
    }
    panel += kPanelCols;
    strip += kDepthStep;
  }
  for (std::size_t i = 0; i < Rows; ++i) {
    if (add) {
      sums[i][0] = Vec::add(Vec::load(add + i * stride), sums[i][0]);
      sums[i][1] = Vec::add(Vec::load(add + i * stride + kLanes), sums[i][1]);
    }
    sums[i][0].store(out + i * stride);
    sums[i][1].store(out + i * stride + kLanes);
  }
}

using Tile = void (*)(const float*, const float*, std::size_t, float*, const float*, std::size_t);

template <bool Transposed, std::size_t... Index>
Tile tile_of(std::size_t rows, std::index_sequence<Index...>) {
  static constexpr Tile kTiles[] = {&multiply_tile<Index + 1, Transposed>...};
  return kTiles[rows - 1];
}

void multiply(const float* strip, bool transposed, const float* panel, std::size_t depth,
              std::size_t rows, std::size_t cols, float* out, const float* add,
              std::size_t stride) {
  constexpr auto kSizes = std::make_index_sequence<kStripRows>{};
  const Tile tile = transposed ? tile_of<true>(rows, kSizes) : tile_of<false>(rows, kSizes);
  if (cols == kPanelCols) {
    tile(strip, panel, depth, out, add, stride);
    return;
  }
  // Columns at the edge: the same instructions into a whole tile of our own.
  alignas(64) float whole[kStripRows * kPanelCols] = {};
  if (add) {
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t j = 0; j < cols; ++j) whole[i * kPanelCols + j] = add[i * stride + j];
    }
  }
  tile(strip, panel, depth, whole, add ? whole : nullptr, kPanelCols);
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < cols; ++j) out[i * stride + j] = whole[i * kPanelCols + j];
  }
}

}  // namespace

const MatmulKernel LOCKSTEP_MATMUL_KERNEL = {
    .name = LOCKSTEP_MATMUL_NAME,
    .precision = Precision::kF32,
    .strip_rows = kStripRows,
    .panel_cols = kPanelCols,
    .strip_floats = kStripRows * kStripStride,
    .panel_floats = kMaxDepthBlock * kPanelCols,
    .pack_strip = &pack_strip,
    .pack_panel = &pack_panel,
    .multiply = &multiply,
};

}  // namespace lockstep
