#include "lockstep/model/cpu/transformer.h"

#include <fmt/format.h>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/model/cpu/passes.h"

namespace lockstep {
namespace {

std::size_t tokens_of(int rows, int context) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(context);
}

}  // namespace

struct Transformer::State {
  State(const ModelConfig& config, Precision precision, ThreadPool& pool, int rows, int context,
        bool recompute)
      : layout(config),
        max_rows(rows),
        max_context(context),
        passes(layout, precision, pool, tokens_of(rows, context), static_cast<std::size_t>(context),
               recompute) {}

  ParameterLayout layout;
  int max_rows;
  int max_context;
  Passes passes;
  std::chrono::steady_clock::time_point forward_ended;

  Weights<const float> weights(std::span<const float> parameters) const {
    LOCKSTEP_CHECK(parameters.size() == layout.size());
    return {layout, parameters.data()};
  }
  void check(const Batch& batch) const {
    check_batch(batch, max_rows, max_context, layout.config().vocab);
  }
};

Transformer::Transformer(const ModelConfig& config, Precision precision, ThreadPool& pool,
                         int max_rows, int max_context, bool recompute) {
  validate(config);
  if (max_rows < 1 || max_context < 1 || max_context > config.context) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("room for {} x {} tokens, where the model's context is {}", max_rows,
                            max_context, config.context));
  }
  state_ = std::make_unique<State>(config, precision, pool, max_rows, max_context, recompute);
}

Transformer::~Transformer() = default;

const ParameterLayout& Transformer::layout() const { return state_->layout; }

LossSum Transformer::loss(std::span<const float> parameters, const Batch& batch) {
  state_->check(batch);
  const Weights<const float> weights = state_->weights(parameters);
  state_->passes.forward(weights, batch);
  return state_->passes.loss(weights, batch);
}

LossSum Transformer::gradient(std::span<const float> parameters, const Batch& batch,
                              std::span<float> gradient, const RangeReady& ready) {
  LOCKSTEP_CHECK(gradient.size() == state_->layout.size());
  state_->check(batch);
  const Weights<const float> weights = state_->weights(parameters);
  state_->passes.forward(weights, batch);
  state_->forward_ended = std::chrono::steady_clock::now();
  return state_->passes.backward(weights, batch, {state_->layout, gradient.data()}, ready);
}

std::chrono::steady_clock::time_point Transformer::forward_ended() const {
  return state_->forward_ended;
}

void Transformer::logits(std::span<const float> parameters, const Batch& batch,
                         std::span<float> out) {
  state_->check(batch);
  LOCKSTEP_CHECK(out.size() ==
                 batch.tokens.size() * static_cast<std::size_t>(state_->layout.config().vocab));
  const Weights<const float> weights = state_->weights(parameters);
  state_->passes.forward(weights, batch);
  state_->passes.logits(weights, out.data());
}

}  // namespace lockstep
