#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/model/cpu/transformer.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/run/plan.h"
#include "lockstep/run/train.h"

namespace lockstep {
namespace {

// The gradient of a batch, on the device of the plan.
LossSum gradient_of(const TrainPlan& plan, const Batch& batch, ThreadPool& pool,
                    std::span<float> gradient) {
  if (plan.gpu) {
    const auto model = make_gpu_model({.model = plan.how.model,
                                       .precision = plan.how.precision,
                                       .adamw = {},
                                       .rows = batch.rows,
                                       .context = batch.context,
                                       .accumulators = 1,
                                       .shard = {},
                                       .recompute = plan.how.recompute});
    model->set_parameters(plan.init->parameters.span());
    model->gradient(batch, 0, {});
    const LossSum sum = model->finish_lanes().front().sum;
    model->get_accumulator(0, gradient);
    return sum;
  }
  Transformer transformer(plan.how.model, plan.how.precision, pool, batch.rows, batch.context);
  return transformer.gradient(plan.init->parameters.span(), batch, gradient);
}

}  // namespace

int replay_lane(const TrainOptions& options) {
  if (options.init.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "--replay needs --init DIR, the weights that the halted run left in --out");
  }
  const HaltReport halted = read_halt_report(options.replay);
  const TrainPlan plan = make_train_plan(options);
  ThreadPool pool(options.threads > 0 ? options.threads : available_cores());
  const auto rows = static_cast<int>(halted.samples.size());
  const int context = plan.training.context();
  const auto length = static_cast<std::size_t>(context);
  std::vector<std::int32_t> tokens(halted.samples.size() * length), targets(tokens.size());
  for (std::size_t row = 0; row < halted.samples.size(); ++row) {
    if (halted.samples[row] >= plan.training.size()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} names sample {}, but the data has {}: is it the same data?",
                              options.replay, halted.samples[row], plan.training.size()));
    }
    plan.training.read(halted.samples[row], std::span(tokens).subspan(row * length, length),
                       std::span(targets).subspan(row * length, length));
  }
  const ParameterLayout layout(plan.how.model);
  FloatBuffer gradient(layout.size());
  const LossSum sum = gradient_of(plan, {tokens, targets, rows, context}, pool, gradient.span());
  fmt::print("step {}, lane {}: loss {} per token over {} tokens\n", halted.step, halted.lane,
             sum.loss / static_cast<double>(sum.tokens), sum.tokens);
  bool finite = std::isfinite(sum.loss);
  for (const TensorSpec& tensor : layout.tensors()) {
    const std::span<const float> values =
        gradient.span().subspan(tensor.range.begin, tensor.range.size());
    const auto bad =
        std::ranges::count_if(values, [](float value) { return !std::isfinite(value); });
    if (bad == 0) continue;
    finite = false;
    fmt::print("{}: {} of {} elements of the gradient are not finite\n", tensor.name, bad,
               values.size());
  }
  fmt::print("{}\n", finite ? "everything is finite" : "the lane is not finite");
  return finite ? 0 : 3;
}

}  // namespace lockstep
