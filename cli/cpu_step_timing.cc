#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include "cli/step_timing.h"
#include "lockstep/base/float_buffer.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/model/cpu/adamw.h"
#include "lockstep/model/cpu/matmul.h"
#include "lockstep/model/cpu/transformer.h"
#include "lockstep/model/init.h"

namespace lockstep::cli {
namespace {

class CpuStepBench final : public StepBench {
 public:
  explicit CpuStepBench(const StepOptions& options)
      : StepBench(options.model, options.batch),
        precision_(options.precision),
        pool_(options.threads),
        model_(options.model, options.precision, pool_, options.batch, options.model.context),
        optimizer_(model_.layout(), AdamWOptions{}),
        parameters_(model_.layout().size()),
        gradient_(model_.layout().size()),
        norm_sums_(norm_blocks(model_.layout().size())) {
    initialise(model_.layout(), kBenchSeed, pool_, parameters_.span());
  }

  using StepBench::step;
  double step() override {
    const LossSum loss = model_.gradient(parameters_.span(), batch(), gradient_.span());
    const double norm = std::sqrt(sum_of_squares(gradient_.span(), pool_, norm_sums_));
    optimizer_.step(parameters_.span(), gradient_.span(),
                    gradient_factor(norm, loss.tokens, kBenchClip), learning_rate(), steps_++,
                    pool_);
    return loss.loss / static_cast<double>(loss.tokens);
  }

  std::vector<float> parameters() const override {
    return {parameters_.span().begin(), parameters_.span().end()};
  }
  const ParameterLayout& layout() const override { return model_.layout(); }

  // Three sizes of 2048, the best of several.
  double matmul_gflops() override {
    constexpr std::size_t kSize = 2048;
    constexpr int kRepeats = 5;
    Matmul multiply(pool_, precision_);
    const FloatBuffer a(kSize * kSize);
    const FloatBuffer b(kSize * kSize);
    const FloatBuffer out(kSize * kSize);
    std::ranges::fill(a.span(), 0.5F);
    std::ranges::fill(b.span(), 0.25F);
    double best = std::numeric_limits<double>::infinity();
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
      const auto start = std::chrono::steady_clock::now();
      multiply({.rows = kSize,
                .cols = kSize,
                .depth = kSize,
                .a = {a.data(), kSize},
                .b = {b.data(), kSize},
                .out = out.data(),
                .out_stride = kSize});
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      best = std::min(best, took.count());
    }
    return 2.0 * kSize * kSize * kSize / best / 1e9;
  }

 private:
  Precision precision_;
  ThreadPool pool_;
  Transformer model_;
  AdamW optimizer_;
  FloatBuffer parameters_, gradient_;
  std::vector<double> norm_sums_;
  std::int64_t steps_ = 0;
};

}  // namespace

std::unique_ptr<StepBench> make_cpu_step_bench(const StepOptions& options) {
  return std::make_unique<CpuStepBench>(options);
}

}  // namespace lockstep::cli
