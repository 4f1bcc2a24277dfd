#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

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
  Transformer transformer(plan.how.model, plan.how.precision, pool, batch.rows, batch.context,
                          plan.how.recompute);
  return transformer.gradient(plan.init->parameters.span(), batch, gradient);
}

// Computes a lane once more and tells what is not finite in it. Returns whether all of it is.
bool replay(const TrainOptions& options, const TrainPlan& plan, std::int64_t step,
            const HaltReport::Lane& lane, ThreadPool& pool) {
  const auto rows = static_cast<int>(lane.samples.size());
  const int context = plan.training.context();
  const auto length = static_cast<std::size_t>(context);
  std::vector<std::int32_t> tokens(lane.samples.size() * length), targets(tokens.size());
  for (std::size_t row = 0; row < lane.samples.size(); ++row) {
    if (lane.samples[row] >= plan.training.size()) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} names sample {}, but the data has {}: is it the same data?",
                              options.replay, lane.samples[row], plan.training.size()));
    }
    plan.training.read(lane.samples[row], std::span(tokens).subspan(row * length, length),
                       std::span(targets).subspan(row * length, length));
  }
  const ParameterLayout layout(plan.how.model);
  FloatBuffer gradient(layout.size());
  const LossSum sum = gradient_of(plan, {tokens, targets, rows, context}, pool, gradient.span());
  fmt::print("step {}, lane {}: loss {} per token over {} tokens\n", step, lane.lane,
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
  return finite;
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
  const std::vector<HaltReport::Lane> lanes = halted.lanes();
  bool finite = true;
  for (const HaltReport::Lane& lane : lanes) {
    if (halted.what == "crash") {  // the last line then tells which lane it was
      fmt::print("step {}, lane {}: computing\n", halted.step, lane.lane);
      std::fflush(stdout);
    }
    finite = replay(options, plan, halted.step, lane, pool) && finite;
  }
  fmt::print("{}\n", finite ? "everything is finite" : "the lane is not finite");
  return finite ? 0 : 3;
}

}  // namespace lockstep
