#include "lockstep/model/transformer.h"

#include <fmt/format.h>

#include <limits>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/model/cpu/passes.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(std::string message) {
  throw Error(ErrorCode::kInvalidArgument, std::move(message));
}

std::size_t tokens_of(int rows, int context) {
  return static_cast<std::size_t>(rows) * static_cast<std::size_t>(context);
}

// Token ids at or beyond the vocabulary; a negative id is one, a negative target is not.
void check_ids(const Batch& batch, std::span<const std::int32_t> ids, int least, int vocab,
               const char* what) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < vocab && ids[i] >= least) continue;
    const auto context = static_cast<std::size_t>(batch.context);
    refuse(fmt::format("{} {} in row {}, position {} is not in the vocabulary of {}", what, ids[i],
                       i / context, i % context, vocab));
  }
}

}  // namespace

struct Transformer::State {
  State(const ModelConfig& config, Precision precision, ThreadPool& pool, int rows, int context)
      : layout(config),
        max_rows(rows),
        max_context(context),
        passes(layout, precision, pool, tokens_of(rows, context),
               static_cast<std::size_t>(context)) {}

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

void check_batch(const Batch& batch, int max_rows, int max_context, int vocab) {
  if (batch.rows < 1 || batch.context < 1 || batch.rows > max_rows || batch.context > max_context) {
    refuse(fmt::format("a batch of {} x {} tokens, where there is room for {} x {}", batch.rows,
                       batch.context, max_rows, max_context));
  }
  const std::size_t tokens = tokens_of(batch.rows, batch.context);
  if (batch.tokens.size() != tokens || batch.targets.size() != tokens) {
    refuse(fmt::format("a batch of {} x {} has {} tokens and {} targets", batch.rows, batch.context,
                       batch.tokens.size(), batch.targets.size()));
  }
  check_ids(batch, batch.tokens, 0, vocab, "token");
  check_ids(batch, batch.targets, std::numeric_limits<int>::min(), vocab, "target");
}

Transformer::Transformer(const ModelConfig& config, Precision precision, ThreadPool& pool,
                         int max_rows, int max_context) {
  validate(config);
  if (max_rows < 1 || max_context < 1 || max_context > config.context) {
    refuse(fmt::format("room for {} x {} tokens, where the model's context is {}", max_rows,
                       max_context, config.context));
  }
  state_ = std::make_unique<State>(config, precision, pool, max_rows, max_context);
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
