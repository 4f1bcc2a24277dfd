#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/float_buffer.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/model/adamw.h"
#include "lockstep/model/transformer.h"

namespace lockstep::cli {

// One model and its optimizer, trained on one fixed batch: what a step costs without data and
// communication.
class StepBench {
 public:
  StepBench(const ModelConfig& config, Precision precision, int batch, int threads);

  // Forward, backward, norm, clipping, AdamW. Returns the loss per token.
  double step();
  // The parameters as they are now: f32, the tensors in Hugging Face's order.
  void write_weights(const std::string& path) const;

  int tokens() const { return static_cast<int>(tokens_.size()); }
  // Multiplications and additions of one step: matrix products of all parameters but the
  // embedding, which is looked up, and of causal attention.
  double flops() const;

  ThreadPool& pool() { return pool_; }

 private:
  ThreadPool pool_;
  ModelConfig config_;
  Transformer model_;
  AdamW optimizer_;
  FloatBuffer parameters_, gradient_;
  std::vector<double> norm_sums_;
  std::vector<std::int32_t> tokens_, targets_;
  int batch_;
  std::int64_t steps_ = 0;
};

// Token `index` of the batch: noise that any program can repeat. Targets are the tokens that
// follow.
std::int32_t bench_token(std::uint32_t index, int vocab);

// GFLOP/s of a product of three sizes 2048, the best of several.
double matmul_gflops(ThreadPool& pool, Precision precision);

}  // namespace lockstep::cli
