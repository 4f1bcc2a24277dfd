// The f32 loops of matmul_kernel.h. Each matmul_*.cc defines Vec (a vector of kLanes floats with
// load, store, broadcast, multiply_add, add and transpose), kStripRows, kFetchSource (whether a
// tile asks for TileOut::source), LOCKSTEP_MATMUL_KERNEL and LOCKSTEP_MATMUL_NAME, all in the
// anonymous namespace, and includes this file once.
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

// A cache line more than needed: strips are stored in whole vectors, which reach beyond their end,
// and panels written side by side must not fall into the same sets of the cache.
constexpr std::size_t kStripFloats = kStripRows * kMaxDepthBlock + 16;
constexpr std::size_t kPanelFloats = kPanelCols * kMaxDepthBlock + 16;
static_assert(kStripRows <= kLanes);

// In strips and in panels, what belongs to one k lies side by side.

// How far ahead of copying the next lines of a matrix are asked for: they are far apart, which the
// processor does not foresee.
constexpr std::size_t kPrefetchRows = 8;

// Neighbouring rows of a transposed matrix are neighbours in memory, so all strips are filled at
// once, k by k.
void pack_transposed_strips(const Operand& a, std::size_t all_rows, const RowBlock& rows,
                            const DepthBlock& block, float* strips) {
  std::size_t whole =
      0;  // strips of which kStripRows rows can be read; a row too many does no harm
  std::size_t begin[kMaxStrips];
  for (std::size_t s = 0; s < rows.strips; ++s) {
    begin[s] = s * rows.rows / rows.strips;
    if (rows.row + begin[s] + kLanes <= all_rows) whole = s + 1;
  }
  for (std::size_t i = 0; i < block.depth; ++i) {
    const float* source = a.data + (block.k + i) * a.stride + rows.row;
    float* to = strips + i * kStripRows;
    for (std::size_t j = 0; j < rows.rows; j += 16) {
      __builtin_prefetch(source + kPrefetchRows * a.stride + j);
    }
    for (std::size_t s = 0; s < whole; ++s) {
      Vec::load(source + begin[s]).store(to + s * kStripFloats);
    }
    for (std::size_t s = whole; s < rows.strips; ++s) {
      for (std::size_t j = begin[s]; j < begin[s] + kStripRows && rows.row + j < all_rows; ++j) {
        to[s * kStripFloats + j - begin[s]] = source[j];
      }
    }
  }
}

void pack_strips(const Operand& a, std::size_t all_rows, const RowBlock& rows,
                 const DepthBlock& block, float* strips) {
  if (a.transposed) {
    pack_transposed_strips(a, all_rows, rows, block, strips);
    return;
  }
  for (std::size_t s = 0; s < rows.strips; ++s) {
    const std::size_t row = rows.row + s * rows.rows / rows.strips;
    const std::size_t height = rows.row + (s + 1) * rows.rows / rows.strips - row;
    const float* source = a.data + row * a.stride + block.k;
    float* strip = strips + s * kStripFloats;
    std::size_t done = 0;
    for (; done + kLanes <= block.depth; done += kLanes) {
      Vec::transpose(source + done, a.stride, height, strip + done * kStripRows, kStripRows);
    }
    for (; done < block.depth; ++done) {
      for (std::size_t j = 0; j < height; ++j) {
        strip[done * kStripRows + j] = source[j * a.stride + done];
      }
    }
  }
}

// A panel at the right edge, filled up with zeros.
void pack_edge_panel(const Operand& b, std::size_t col, std::size_t cols, const DepthBlock& block,
                     float* panel) {
  const std::size_t k_step = b.transposed ? 1 : b.stride;
  const std::size_t col_step = b.transposed ? b.stride : 1;
  const float* source = b.data + block.k * k_step + col * col_step;
  for (std::size_t i = 0; i < block.depth; ++i) {
    for (std::size_t j = 0; j < kPanelCols; ++j) {
      panel[i * kPanelCols + j] = j < cols ? source[i * k_step + j * col_step] : 0.0F;
    }
  }
}

void pack_transposed_panel(const Operand& b, std::size_t col, const DepthBlock& block,
                           float* panel) {
  const float* source = b.data + col * b.stride + block.k;
  std::size_t done = 0;
  for (; done + kLanes <= block.depth; done += kLanes) {
    for (std::size_t half = 0; half < kPanelCols; half += kLanes) {
      Vec::transpose(source + half * b.stride + done, b.stride, kLanes,
                     panel + done * kPanelCols + half, kPanelCols);
    }
  }
  for (; done < block.depth; ++done) {
    for (std::size_t j = 0; j < kPanelCols; ++j) {
      panel[done * kPanelCols + j] = source[j * b.stride + done];
    }
  }
}

void pack_panels(const Operand& b, std::size_t col, std::size_t cols, const DepthBlock& block,
                 float* panels) {
  const std::size_t whole = cols / kPanelCols;
  if (b.transposed) {
    for (std::size_t p = 0; p < whole; ++p) {
      pack_transposed_panel(b, col + p * kPanelCols, block, panels + p * kPanelFloats);
    }
  } else {
    for (std::size_t i = 0; i < block.depth; ++i) {
      const float* source = b.data + (block.k + i) * b.stride + col;
      float* to = panels + i * kPanelCols;
      for (std::size_t p = 0; p < whole; ++p) {
        __builtin_prefetch(source + kPrefetchRows * b.stride + p * kPanelCols);
        __builtin_prefetch(source + kPrefetchRows * b.stride + p * kPanelCols + kLanes);
        Vec::load(source + p * kPanelCols).store(to + p * kPanelFloats);
        Vec::load(source + p * kPanelCols + kLanes).store(to + p * kPanelFloats + kLanes);
      }
    }
  }
  if (const std::size_t edge = whole * kPanelCols; edge < cols) {
    pack_edge_panel(b, col + edge, cols - edge, block, panels + whole * kPanelFloats);
  }
}

// Adds what one k gives to the sums of a tile.
template <std::size_t Rows>
[[gnu::always_inline]] inline void add_outer_product(const float* strip, const float* panel,
                                                     Vec (&sums)[Rows][2]) {
  const Vec left = Vec::load(panel);
  const Vec right = Vec::load(panel + kLanes);
#pragma GCC unroll 16
  for (std::size_t i = 0; i < Rows; ++i) {
    const Vec factor = Vec::broadcast(strip + i);
    sums[i][0] = Vec::multiply_add(factor, left, sums[i][0]);
    sums[i][1] = Vec::multiply_add(factor, right, sums[i][1]);
  }
}

// One tile of Rows rows and all columns of the panel.
template <std::size_t Rows>
void multiply_tile(const float* strip, const float* panel, std::size_t depth, const TileOut& to) {
  Vec sums[Rows][2];
#pragma GCC unroll 16
  for (std::size_t i = 0; i < Rows; ++i) {
    sums[i][0] = Vec::zero();
    sums[i][1] = Vec::zero();
  }
  std::size_t k = 0;
  for (; k + 4 <= depth; k += 4) {
    __builtin_prefetch(to.ahead + k * to.ahead_step, 0, 2);
    if constexpr (kFetchSource) {
      const std::size_t line = k / 4;
      __builtin_prefetch(to.source.data + (line & ((1U << to.source.shift) - 1)) * to.source.near +
                             (line >> to.source.shift) * to.source.far,
                         0, 2);
    }
    // The result arrives while the sums are computed; all its lines at once would hold up the rest.
    if (k < 8 * Rows) {
      __builtin_prefetch(to.out + k / 8 * to.stride + k / 4 % 2 * kLanes, 1);
    }
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) {
      add_outer_product<Rows>(strip + (k + i) * kStripRows, panel + (k + i) * kPanelCols, sums);
    }
  }
  for (; k < depth; ++k) {
    add_outer_product<Rows>(strip + k * kStripRows, panel + k * kPanelCols, sums);
  }
#pragma GCC unroll 16
  for (std::size_t i = 0; i < Rows; ++i) {
    if (to.add) {
      sums[i][0] = Vec::add(Vec::load(to.add + i * to.stride), sums[i][0]);
      sums[i][1] = Vec::add(Vec::load(to.add + i * to.stride + kLanes), sums[i][1]);
    }
    sums[i][0].store(to.out + i * to.stride);
    sums[i][1].store(to.out + i * to.stride + kLanes);
  }
}

using Tile = void (*)(const float* strip, const float* panel, std::size_t depth, const TileOut& to);

template <std::size_t... Index>
Tile tile_of(std::size_t rows, std::index_sequence<Index...>) {
  static constexpr Tile kTiles[] = {&multiply_tile<Index + 1>...};
  return kTiles[rows - 1];
}

void multiply(const float* strip, const float* panel, std::size_t depth, std::size_t rows,
              std::size_t cols, const TileOut& to) {
  const Tile tile = tile_of(rows, std::make_index_sequence<kStripRows>{});
  if (cols == kPanelCols) {
    tile(strip, panel, depth, to);
    return;
  }
  // Columns at the edge: the same instructions into a whole tile of our own.
  alignas(64) float whole[kStripRows * kPanelCols] = {};
  if (to.add) {
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t j = 0; j < cols; ++j) whole[i * kPanelCols + j] = to.add[i * to.stride + j];
    }
  }
  tile(strip, panel, depth,
       {.out = whole,
        .add = to.add ? whole : nullptr,
        .stride = kPanelCols,
        .ahead = to.ahead,
        .ahead_step = to.ahead_step,
        .source = to.source});
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < cols; ++j) to.out[i * to.stride + j] = whole[i * kPanelCols + j];
  }
}

}  // namespace

const MatmulKernel LOCKSTEP_MATMUL_KERNEL = {
    .name = LOCKSTEP_MATMUL_NAME,
    .precision = Precision::kF32,
    .strip_rows = kStripRows,
    .panel_cols = kPanelCols,
    .strip_floats = kStripFloats,
    .panel_floats = kPanelFloats,
    .pack_strips = &pack_strips,
    .pack_panels = &pack_panels,
    .multiply = &multiply,
};

}  // namespace lockstep
