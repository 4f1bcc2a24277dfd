#pragma once

#include <chrono>
#include <memory>
#include <span>

#include "lockstep/base/thread_pool.h"
#include "lockstep/model/batch.h"
#include "lockstep/model/config.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// Forward and backward passes on the CPU. Bits depend on the parameters, the batch, the precision
// and the kind of processor: not on the threads, and not on what was computed before. One thread at
// a time. Throws Error{kInvalidArgument} for a batch that does not fit or a token beyond the
// vocabulary.
class Transformer {
 public:
  // Memory for batches of up to `max_rows` sequences of up to `max_context` tokens is taken here;
  // less with `recompute`, for which gradient() computes most activations twice, to the same bits.
  Transformer(const ModelConfig& config, Precision precision, ThreadPool& pool, int max_rows,
              int max_context, bool recompute = false);
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
