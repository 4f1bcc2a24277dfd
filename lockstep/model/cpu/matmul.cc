#include "lockstep/model/cpu/matmul.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/float_buffer.h"
#include "lockstep/model/cpu/matmul_kernel.h"

namespace lockstep {
namespace {

// Strips that one task takes: together they stay in the second-level cache while the panels pass.
constexpr std::size_t kTaskStrips = 8;
constexpr std::size_t kTaskPanels = 16;

std::size_t ceil_div(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

// [k, k + depth) of the sum; blocks of one product are alike, and depend on its depth alone.
struct DepthBlocks {
  explicit DepthBlocks(std::size_t depth)
      : total(depth),
        count(std::max<std::size_t>(1, ceil_div(depth, kMaxDepthBlock))),
        each(ceil_div(depth, count)) {}

  std::size_t begin(std::size_t block) const { return block * each; }
  std::size_t length(std::size_t block) const { return std::min(each, total - begin(block)); }

  std::size_t total, count, each;
};

// Panels lie by depth block, then by column: those of one block are read one after the other.
void pack_panel(const MatmulKernel& kernel, const Product& product, const DepthBlocks& blocks,
                std::size_t block, std::size_t panel, float* panels) {
  const std::size_t col = panel * kernel.panel_cols;
  const std::size_t across = ceil_div(product.cols, kernel.panel_cols);
  kernel.pack_panel(product.b, blocks.begin(block), blocks.length(block), col,
                    std::min(kernel.panel_cols, product.cols - col),
                    panels + (block * across + panel) * kernel.panel_floats);
}

// The rows [row, row_end) and panels [panel, panel_end) of the result.
struct Task {
  std::size_t row, row_end;
  std::size_t panel, panel_end;
};

void compute(const MatmulKernel& kernel, const Product& product, const DepthBlocks& blocks,
             const float* panels, float* strips, const Task& task) {
  const std::size_t across = ceil_div(product.cols, kernel.panel_cols);
  for (std::size_t block = 0; block < blocks.count; ++block) {
    const std::size_t depth = blocks.length(block);
    for (std::size_t row = task.row, at = 0; row < task.row_end; row += kernel.strip_rows, ++at) {
      kernel.pack_strip(product.a, row, std::min(kernel.strip_rows, task.row_end - row),
                        blocks.begin(block), depth, strips + at * kernel.strip_floats);
    }
    const float* add = block == 0 ? product.add : product.out;
    for (std::size_t panel = task.panel; panel < task.panel_end; ++panel) {
      const std::size_t col = panel * kernel.panel_cols;
      const std::size_t cols = std::min(kernel.panel_cols, product.cols - col);
      for (std::size_t row = task.row, at = 0; row < task.row_end; row += kernel.strip_rows, ++at) {
        const std::size_t offset = row * product.out_stride + col;
        kernel.multiply(strips + at * kernel.strip_floats, product.a.transposed,
                        panels + (block * across + panel) * kernel.panel_floats, depth,
                        std::min(kernel.strip_rows, task.row_end - row), cols, product.out + offset,
                        add ? add + offset : nullptr, product.out_stride);
      }
    }
  }
}

}  // namespace

std::string_view to_string(Precision precision) {
  return precision == Precision::kF32 ? "fp32" : "bf16";
}

bool supports(Precision precision) { return !supported_kernels(precision).empty(); }

std::vector<const MatmulKernel*> supported_kernels(Precision precision) {
  std::vector<const MatmulKernel*> kernels;
  if (precision != Precision::kF32) return kernels;
#ifdef __x86_64__
  __builtin_cpu_init();
  // Every processor with these has the rest of its level, too.
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) kernels.push_back(&kMatmulV4);
  if (v3) kernels.push_back(&kMatmulV3);
#endif
  kernels.push_back(&kMatmulGeneric);
  return kernels;
}

Matmul::Matmul(ThreadPool& pool, Precision precision)
    : pool_(pool), precision_(precision), workers_(static_cast<std::size_t>(pool.threads())) {
  const auto kernels = supported_kernels(precision);
  if (kernels.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "this processor has no instructions for bf16 products; use --precision fp32");
  }
  kernel_ = kernels.front();
  for (Scratch& scratch : workers_)
    scratch.strips = FloatBuffer(kTaskStrips * kernel_->strip_floats);
}

Matmul::Matmul(ThreadPool& pool, const MatmulKernel& kernel)
    : pool_(pool),
      precision_(kernel.precision),
      kernel_(&kernel),
      workers_(static_cast<std::size_t>(pool.threads())) {
  for (Scratch& scratch : workers_)
    scratch.strips = FloatBuffer(kTaskStrips * kernel_->strip_floats);
}

void Matmul::operator()(const Product& product) {
  if (product.rows == 0 || product.cols == 0) return;
  const DepthBlocks blocks(product.depth);
  const std::size_t across = ceil_div(product.cols, kernel_->panel_cols);
  float* panels = grown(shared_, across * blocks.count * kernel_->panel_floats);
  pool_.run(across * blocks.count, [&](std::size_t index) {
    pack_panel(*kernel_, product, blocks, index / across, index % across, panels);
  });

  const std::size_t task_rows = kTaskStrips * kernel_->strip_rows;
  const std::size_t down = ceil_div(product.rows, task_rows);
  pool_.run(down * ceil_div(across, kTaskPanels), [&](std::size_t index, int worker) {
    const std::size_t row = index % down * task_rows;
    const std::size_t panel = index / down * kTaskPanels;
    compute(*kernel_, product, blocks, panels,
            workers_[static_cast<std::size_t>(worker)].strips.data(),
            {.row = row,
             .row_end = std::min(row + task_rows, product.rows),
             .panel = panel,
             .panel_end = std::min(panel + kTaskPanels, across)});
  });
}

void Matmul::on_worker(int worker, const Product& product) {
  if (product.rows == 0 || product.cols == 0) return;
  Scratch& scratch = workers_[static_cast<std::size_t>(worker)];
  const DepthBlocks blocks(product.depth);
  const std::size_t across = ceil_div(product.cols, kernel_->panel_cols);
  float* panels = grown(scratch.panels, across * blocks.count * kernel_->panel_floats);
  for (std::size_t index = 0; index < across * blocks.count; ++index) {
    pack_panel(*kernel_, product, blocks, index / across, index % across, panels);
  }
  const std::size_t task_rows = kTaskStrips * kernel_->strip_rows;
  for (std::size_t row = 0; row < product.rows; row += task_rows) {
    compute(*kernel_, product, blocks, panels, scratch.strips.data(),
            {.row = row,
             .row_end = std::min(row + task_rows, product.rows),
             .panel = 0,
             .panel_end = across});
  }
}

float* Matmul::grown(FloatBuffer& buffer, std::size_t size) {
  if (buffer.size() < size) buffer = FloatBuffer(size);
  return buffer.data();
}

}  // namespace lockstep
