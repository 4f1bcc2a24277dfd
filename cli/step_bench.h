#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/model/batch.h"
#include "lockstep/model/config.h"
#include "lockstep/model/layout.h"

namespace lockstep::cli {

constexpr double kBenchLearningRate = 3e-4;
constexpr double kBenchClip = 1.0;
constexpr std::uint64_t kBenchSeed = 0;

// One model and its optimizer, trained on one fixed batch: what a step costs without data and
// communication.
class StepBench {
 public:
  virtual ~StepBench() = default;

  // Forward, backward, norm, clipping, AdamW. Returns the loss per token.
  virtual double step() = 0;
  // The same after the batch is replaced: token(i) for i up to tokens(), which is a target only.
  double step(const std::function<std::int32_t(std::size_t)>& token);
  void set_learning_rate(double rate) { learning_rate_ = rate; }
  // The parameters as they are now: f32, in the order of the layout.
  virtual std::vector<float> parameters() const = 0;
  virtual const ParameterLayout& layout() const = 0;
  // GFLOP/s of a large product on the same device.
  virtual double matmul_gflops() = 0;
  virtual double gpu_gib() const { return 0; }

  int tokens() const { return static_cast<int>(tokens_.size()); }
  // Multiplications and additions of one step: matrix products of all parameters but the
  // embedding, which is looked up, and of causal attention.
  double flops() const;
  // f32, the tensors in Hugging Face's order.
  void write_weights(const std::string& path) const;

 protected:
  StepBench(const ModelConfig& config, int batch);
  Batch batch() const;
  double learning_rate() const { return learning_rate_; }

 private:
  int rows_, context_;
  double learning_rate_ = kBenchLearningRate;
  std::vector<std::int32_t> tokens_, targets_;
};

struct StepOptions {
  ModelConfig model;
  Precision precision = Precision::kF32;
  int batch = 1;
  int threads = 1;
  bool recompute = false;
};
std::unique_ptr<StepBench> make_cpu_step_bench(const StepOptions& options);
std::unique_ptr<StepBench> make_gpu_step_bench(const StepOptions& options);

// Token `index` of the batch: noise that any program can repeat. Targets are the tokens that
// follow.
std::int32_t bench_token(std::uint32_t index, int vocab);

}  // namespace lockstep::cli
