#include "cli/step_timing.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/model/init.h"
#include "lockstep/model/norm.h"

namespace lockstep::cli {
namespace {

constexpr double kLearningRate = 3e-4;
constexpr double kClip = 1.0;
constexpr std::uint64_t kSeed = 0;

}  // namespace

StepBench::StepBench(const ModelConfig& config, Precision precision, int batch, int threads)
    : pool_(threads),
      config_(config),
      model_(config, precision, pool_, batch, config.context),
      optimizer_(model_.layout(), AdamWOptions{}),
      parameters_(model_.layout().size()),
      gradient_(model_.layout().size()),
      norm_sums_(norm_blocks(model_.layout().size())),
      batch_(batch) {
  initialise(model_.layout(), kSeed, pool_, parameters_.span());
  const auto count = static_cast<std::uint32_t>(batch * config.context);
  for (std::uint32_t i = 0; i < count; ++i) {
    tokens_.push_back(bench_token(i, config.vocab));
    targets_.push_back(bench_token(i + 1, config.vocab));
  }
}

double StepBench::step() {
  const Batch batch = {
      .tokens = tokens_, .targets = targets_, .rows = batch_, .context = config_.context};
  const LossSum loss = model_.gradient(parameters_.span(), batch, gradient_.span());
  const double norm = std::sqrt(sum_of_squares(gradient_.span(), pool_, norm_sums_));
  optimizer_.step(parameters_.span(), gradient_.span(), gradient_factor(norm, loss.tokens, kClip),
                  kLearningRate, steps_++, pool_);
  return loss.loss / static_cast<double>(loss.tokens);
}

void StepBench::write_weights(const std::string& path) const {
  std::ofstream file(path, std::ios::binary);
  for (const TensorSpec& tensor : model_.layout().tensors()) {
    file.write(reinterpret_cast<const char*>(parameters_.data() + tensor.range.begin),
               static_cast<std::streamsize>(tensor.range.size() * sizeof(float)));
  }
  if (!file.flush()) throw_io(fmt::format("writing {}", path), errno);
}

double StepBench::flops() const {
  const auto parameters = static_cast<double>(model_.layout().size());
  const double embedding = static_cast<double>(config_.vocab) * config_.hidden;
  const double attention =
      6.0 * config_.layers * config_.hidden * static_cast<double>(config_.context);
  const double multiplied = config_.tie_embeddings ? parameters : parameters - embedding;
  return tokens() * (6 * multiplied + attention);
}

std::int32_t bench_token(std::uint32_t index, int vocab) {
  return static_cast<std::int32_t>((index * 2654435761U >> 8) % static_cast<std::uint32_t>(vocab));
}

double matmul_gflops(ThreadPool& pool, Precision precision) {
  constexpr std::size_t kSize = 2048;
  constexpr int kRepeats = 5;
  Matmul multiply(pool, precision);
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

}  // namespace lockstep::cli
