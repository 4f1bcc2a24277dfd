#include "cli/step_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>

#include "lockstep/base/error.h"
#include "lockstep/base/float_buffer.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/model/cpu/adamw.h"
#include "lockstep/model/cpu/matmul.h"
#include "lockstep/model/cpu/transformer.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/model/init.h"

namespace lockstep::cli {
namespace {

class CpuStepBench final : public StepBench {
 public:
  explicit CpuStepBench(const StepOptions& options)
      : StepBench(options.model, options.batch),
        precision_(options.precision),
        pool_(options.threads),
        model_(options.model, options.precision, pool_, options.batch, options.model.context,
               options.recompute),
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

class GpuStepBench final : public StepBench {
 public:
  explicit GpuStepBench(const StepOptions& options)
      : StepBench(options.model, options.batch),
        precision_(options.precision),
        model_(make_gpu_model({.model = options.model,
                               .precision = options.precision,
                               .adamw = {},
                               .rows = options.batch,
                               .context = options.model.context,
                               .accumulators = 1,
                               .shard = {0, ParameterLayout(options.model).size()},
                               .recompute = options.recompute})) {
    ThreadPool pool(options.threads);
    std::vector<float> values(layout().size());
    initialise(layout(), kBenchSeed, pool, values);
    model_->set_parameters(values);
  }

  using StepBench::step;
  double step() override {
    model_->gradient(batch(), 0, {});
    model_->update({.tokens = tokens(),
                    .clip = kBenchClip,
                    .learning_rate = learning_rate(),
                    .step = steps_++});
    const LossSum loss = model_->finish_lanes().front().sum;
    model_->finish_update();
    return loss.loss / static_cast<double>(loss.tokens);
  }

  std::vector<float> parameters() const override {
    std::vector<float> values(layout().size());
    model_->get_parameters(values);
    return values;
  }
  const ParameterLayout& layout() const override { return model_->layout(); }
  double matmul_gflops() override { return gpu_matmul_gflops(precision_); }
  double gpu_gib() const override { return static_cast<double>(model_->bytes()) / (1 << 30); }

 private:
  Precision precision_;
  std::unique_ptr<GpuModel> model_;
  std::int64_t steps_ = 0;
};

}  // namespace

StepBench::StepBench(const ModelConfig& config, int batch)
    : rows_(batch), context_(config.context) {
  const auto count = static_cast<std::uint32_t>(batch * config.context);
  for (std::uint32_t i = 0; i < count; ++i) {
    tokens_.push_back(bench_token(i, config.vocab));
    targets_.push_back(bench_token(i + 1, config.vocab));
  }
}

Batch StepBench::batch() const {
  return {.tokens = tokens_, .targets = targets_, .rows = rows_, .context = context_};
}

double StepBench::step(const std::function<std::int32_t(std::size_t)>& token) {
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    tokens_[i] = token(i);
    targets_[i] = token(i + 1);
  }
  return step();
}

void StepBench::write_weights(const std::string& path) const {
  const std::vector<float> values = parameters();
  std::ofstream file(path, std::ios::binary);
  for (const TensorSpec& tensor : layout().tensors()) {
    file.write(reinterpret_cast<const char*>(values.data() + tensor.range.begin),
               static_cast<std::streamsize>(tensor.range.size() * sizeof(float)));
  }
  if (!file.flush()) throw_io(fmt::format("writing {}", path), errno);
}

double StepBench::flops() const {
  const ModelConfig& config = layout().config();
  const auto parameter_count = static_cast<double>(layout().size());
  const double embedding = static_cast<double>(config.vocab) * config.hidden;
  const double attention =
      6.0 * config.layers * config.hidden * static_cast<double>(config.context);
  const double multiplied = config.tie_embeddings ? parameter_count : parameter_count - embedding;
  return tokens() * (6 * multiplied + attention);
}

std::int32_t bench_token(std::uint32_t index, int vocab) {
  return static_cast<std::int32_t>((index * 2654435761U >> 8) % static_cast<std::uint32_t>(vocab));
}

std::unique_ptr<StepBench> make_cpu_step_bench(const StepOptions& options) {
  return std::make_unique<CpuStepBench>(options);
}

std::unique_ptr<StepBench> make_gpu_step_bench(const StepOptions& options) {
  return std::make_unique<GpuStepBench>(options);
}

}  // namespace lockstep::cli
