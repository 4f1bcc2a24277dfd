#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "lockstep/base/thread_pool.h"
#include "lockstep/model/config.h"
#include "lockstep/model/cpu/matmul.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// Sequences of equal length, one after the other. A target below 0 is ignored: it adds neither to
// the loss nor to the gradient nor to the count.
struct Batch {
  std::span<const std::int32_t> tokens;
  std::span<const std::int32_t> targets;
  int rows = 0;
  int context = 0;
};

// Throws Error{kInvalidArgument} unless there is room for the batch and all ids are in the
// vocabulary.
void check_batch(const Batch& batch, int max_rows, int max_context, int vocab);

// Sums over tokens, never means.
struct LossSum {
  double loss = 0.0;
  std::int64_t tokens = 0;  // those that counted
};

// Called on the caller's thread when a range of the flat gradient is final: every element is in
// exactly one range, and the ranges come in ascending order.
using RangeReady = std::function<void(Range)>;

// Forward and backward passes on the CPU. Bits depend on the parameters, the batch, the precision
// and the kind of processor: not on the threads, and not on what was computed before. One thread at
// a time. Throws Error{kInvalidArgument} for a batch that does not fit or a token beyond the
// vocabulary.
class Transformer {
 public:
  // Memory for batches of up to `max_rows` sequences of up to `max_context` tokens is taken here.
  Transformer(const ModelConfig& config, Precision precision, ThreadPool& pool, int max_rows,
              int max_context);
  ~Transformer();

  const ParameterLayout& layout() const;

  LossSum loss(std::span<const float> parameters, const Batch& batch);

  // The loss, and the gradient of its sum, which overwrites `gradient`.
  LossSum gradient(std::span<const float> parameters, const Batch& batch, std::span<float> gradient,
                   const RangeReady& ready = {});

  // When the forward pass of the last gradient() ended, for timings.
  std::chrono::steady_clock::time_point forward_ended() const;

  // The logits of every token of the batch (targets are not looked at): tokens x vocab.
  void logits(std::span<const float> parameters, const Batch& batch, std::span<float> out);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
