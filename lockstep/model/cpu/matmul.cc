#include "lockstep/model/cpu/matmul.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/float_buffer.h"
#include "lockstep/base/index.h"
#include "lockstep/base/processor.h"
#include "lockstep/model/cpu/matmul_kernel.h"

namespace lockstep {
namespace {

// Rows of one task: its strips stay in the second-level cache while the panels pass.
constexpr std::size_t kTaskRows = 128;
// Panels of one task of packing.
constexpr std::size_t kPackPanels = 8;

std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

// The depth in blocks that are alike; they depend on the depth alone.
struct DepthBlocks {
  explicit DepthBlocks(std::size_t depth)
      : total(depth),
        count(std::max<std::size_t>(1, ceil_div(depth, kMaxDepthBlock))),
        each(ceil_div(depth, count)) {}

  DepthBlock operator[](std::size_t block) const {
    return {.k = block * each, .depth = std::min(each, total - block * each)};
  }

  std::size_t total, count, each;
};

// How the result is cut into tasks. No element depends on it.
struct Grid {
  Grid(const Product& product, std::size_t panels, std::size_t threads) {
    row_tasks = ceil_div(product.rows, kTaskRows);
    if (row_tasks > 1) {
      // Alike for every thread, as long as the tasks do not become too small to reuse panels.
      const std::size_t even = ceil_div(row_tasks, threads) * threads;
      if (product.rows / even >= kTaskRows / 3) row_tasks = even;
    }
    panel_tasks = row_tasks % threads == 0 ? 1 : std::min(panels, ceil_div(4 * threads, row_tasks));
  }

  RowBlock rows_of(std::size_t index, const Product& product, std::size_t strip_rows) const {
    const std::size_t task = index % row_tasks;
    const std::size_t row = task * product.rows / row_tasks;
    const std::size_t rows = (task + 1) * product.rows / row_tasks - row;
    return {.row = row, .rows = rows, .strips = ceil_div(rows, strip_rows)};
  }
  std::size_t tasks() const { return row_tasks * panel_tasks; }

  std::size_t row_tasks, panel_tasks;
};

// What strips are copied from, brought nearer by the tiles before. A tile asks for a line every
// four k: for four rows of a, or for as many rows of a transposed one.
struct Approach {
  Approach() = default;
  Approach(const Operand& a, const RowBlock& rows, const DepthBlock& block) {
    if (a.transposed) {
      constexpr unsigned kLines = 3;  // 8 lines are kTaskRows
      const std::size_t each = block.depth / 4 >> kLines;
      first = {a.data + block.k * a.stride + rows.row, kLine, a.stride, kLines};
      step = each * a.stride;
      tiles = each > 0 ? ceil_div(block.depth, each) : 0;
    } else {
      first = {a.data + rows.row * a.stride + block.k, a.stride, kLine, 2};
      step = 4 * a.stride;
      tiles = ceil_div(rows.rows, 4);
    }
  }

  // For the tile after which `left` more come before the strips are copied.
  Lines lines(std::size_t left, const float* nothing) const {
    if (left >= tiles) return {nothing, 0, 0, 0};
    Lines at = first;
    at.data += (tiles - 1 - left) * step;
    return at;
  }

  static constexpr std::size_t kLine = 16;
  Lines first = {};
  std::size_t step = 0;
  std::size_t tiles = 0;  // that it takes
};

}  // namespace

std::vector<const MatmulKernel*> supported_kernels(Precision precision) {
  std::vector<const MatmulKernel*> kernels;
#ifdef __x86_64__
  if (precision == Precision::kBf16) {
    // Every processor with the matrix unit converts to bf16, too.
    if (runs_x86_64_v4() && runs_amx_bf16()) kernels.push_back(&kMatmulAmx);
    return kernels;
  }
  if (runs_x86_64_v4()) kernels.push_back(&kMatmulV4);
  if (runs_x86_64_v3()) kernels.push_back(&kMatmulV3);
#endif
  if (precision == Precision::kF32) kernels.push_back(&kMatmulGeneric);
  return kernels;
}

const MatmulKernel& best_kernel(Precision precision) {
  const auto kernels = supported_kernels(precision);
  if (kernels.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("this processor has no matrix products of {0}; --precision {1} works",
                            to_string(precision), to_string(Precision::kF32)));
  }
  return *kernels.front();
}

bool supports(Precision precision) { return !supported_kernels(precision).empty(); }

Matmul::Matmul(ThreadPool& pool, Precision precision) : Matmul(pool, best_kernel(precision)) {}

Matmul::Matmul(ThreadPool& pool, const MatmulKernel& kernel)
    : pool_(pool), kernel_(kernel), workers_(static_cast<std::size_t>(pool.threads())) {
  for (Scratch& scratch : workers_) {
    scratch.strips = FloatBuffer(ceil_div(kTaskRows, kernel.strip_rows) * kernel.strip_floats);
    scratch.panel = FloatBuffer(kernel.panel_floats);
  }
}

Precision Matmul::precision() const { return kernel_.precision; }

void Matmul::operator()(const Product& product) {
  if (product.rows == 0 || product.cols == 0) return;
  const DepthBlocks blocks(product.depth);
  const std::size_t across = ceil_div(product.cols, kernel_.panel_cols);
  const Grid grid(product, across, workers_.size());

  float* panels = nullptr;
  if (grid.row_tasks > 1) {
    const std::size_t floats = across * blocks.count * kernel_.panel_floats;
    if (panels_.size() < floats) panels_ = FloatBuffer(floats);
    panels = panels_.data();
    const std::size_t pack_tasks = ceil_div(across, kPackPanels);
    pool_.run(pack_tasks * blocks.count, [&](std::size_t index) {
      const std::size_t block = index / pack_tasks;
      const std::size_t panel = index % pack_tasks * kPackPanels;
      const std::size_t col = panel * kernel_.panel_cols;
      kernel_.pack_panels(product.b, col,
                          std::min(kPackPanels * kernel_.panel_cols, product.cols - col),
                          blocks[block], panels + (block * across + panel) * kernel_.panel_floats);
    });
  }

  pool_.run(grid.tasks(), [&](std::size_t index, int worker) {
    const std::size_t group = index / grid.row_tasks;
    const std::size_t first_panel = group * across / grid.panel_tasks;
    const std::size_t end_panel = (group + 1) * across / grid.panel_tasks;
    const Scratch& scratch = workers_[index_of(worker)];
    const RowBlock strips = grid.rows_of(index, product, kernel_.strip_rows);
    const auto [row, rows, count] = strips;
    const std::size_t next_task = index + workers_.size();  // of this thread, most likely
    for (std::size_t block = 0; block < blocks.count; ++block) {
      kernel_.pack_strips(product.a, product.rows, strips, blocks[block], scratch.strips.data());
      Approach approach;
      if (block + 1 < blocks.count) {
        approach = Approach(product.a, strips, blocks[block + 1]);
      } else if (next_task < grid.tasks()) {
        approach =
            Approach(product.a, grid.rows_of(next_task, product, kernel_.strip_rows), blocks[0]);
      }
      std::size_t left = (end_panel - first_panel) * count;  // tiles
      for (std::size_t panel = first_panel; panel < end_panel; ++panel) {
        const std::size_t col = panel * kernel_.panel_cols;
        const std::size_t cols = std::min(kernel_.panel_cols, product.cols - col);
        const float* packed = scratch.panel.data();
        if (panels) {
          packed = panels + (block * across + panel) * kernel_.panel_floats;
        } else {
          kernel_.pack_panels(product.b, col, cols, blocks[block], scratch.panel.data());
        }
        const float* add = block == 0 ? product.add : product.out;
        // The strips share the work of bringing the next panel nearer.
        const std::size_t step = panels ? ceil_div(kernel_.panel_cols, count) : 0;
        const float* next = packed + (panels ? kernel_.panel_floats : 0);
        for (std::size_t s = 0; s < count; ++s) {
          const std::size_t top = row + s * rows / count;
          const std::size_t height = row + (s + 1) * rows / count - top;
          const std::size_t offset = top * product.out_stride + col;
          kernel_.multiply(scratch.strips.data() + s * kernel_.strip_floats, packed,
                           blocks[block].depth, height, cols,
                           {.out = product.out + offset,
                            .add = add ? add + offset : nullptr,
                            .stride = product.out_stride,
                            .ahead = next + s * blocks[block].depth * step,
                            .ahead_step = step,
                            .source = approach.lines(--left, packed)});
        }
      }
    }
  });
}

}  // namespace lockstep
