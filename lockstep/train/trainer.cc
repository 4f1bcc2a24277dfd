#include "lockstep/train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/comm/kernels.h"
#include "lockstep/model/init.h"
#include "lockstep/model/norm.h"

namespace lockstep {
namespace {

LanePlan checked(const LanePlan& plan) {
  validate(plan);
  return plan;
}

// "model.norm.weight, element 3, is nan" for the first value of a flat buffer that is not finite.
std::optional<std::string> name_non_finite(const ParameterLayout& layout,
                                           std::span<const float> values) {
  const std::size_t place = find_non_finite(DataType::kF32, values.data(), values.size());
  if (place == values.size()) return std::nullopt;
  for (const TensorSpec& tensor : layout.tensors()) {
    if (place >= tensor.range.begin && place < tensor.range.end) {
      return fmt::format("{}, element {}, is {}", tensor.name, place - tensor.range.begin,
                         values[place]);
    }
  }
  return fmt::format("element {} is {}", place, values[place]);
}

std::string list_of(std::span<const std::uint64_t> ids) {
  std::string text;
  for (const std::uint64_t id : ids) text += fmt::format("{}{}", text.empty() ? "" : ", ", id);
  return text;
}

}  // namespace

Trainer::Trainer(const TrainerOptions& options, Samples training, Samples validation,
                 ThreadPool& pool)
    : options_(options),
      training_(std::move(training)),
      validation_(std::move(validation)),
      pool_(pool),
      lanes_(checked({training_.size(), options.seed, options.global_batch, options.micro_batch})),
      transformer_(options.model, options.precision, pool, static_cast<int>(options.micro_batch),
                   training_.context()),
      parameters_(layout().size()),
      adamw_(layout(), options.adamw),
      reducer_(lanes_.lanes(), layout().size(), pool),
      block_sums_(norm_blocks(layout().size())),
      sample_ids_(options.micro_batch),
      tokens_(options.micro_batch * static_cast<std::size_t>(training_.context())),
      targets_(tokens_.size()) {
  initialise(layout(), options.seed, pool, parameters_.span());
}

std::size_t Trainer::state_bytes() const {
  return (3 + std::size_t{reducer_.slots()}) * transformer_.layout().size() * sizeof(float);
}

Batch Trainer::lane_batch(std::uint32_t lane) {
  lanes_.sample_ids(static_cast<std::uint64_t>(step_), lane, sample_ids_);
  const auto context = static_cast<std::size_t>(training_.context());
  for (std::size_t row = 0; row < sample_ids_.size(); ++row) {
    training_.read(sample_ids_[row], std::span(tokens_).subspan(row * context, context),
                   std::span(targets_).subspan(row * context, context));
  }
  return {tokens_, targets_, static_cast<int>(options_.micro_batch), training_.context()};
}

StepReport Trainer::step() {
  const auto begin = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < reducer_.lane_count(); ++i) {
    const LossSum sum = transformer_.gradient(parameters_.span(), lane_batch(reducer_.lane(i)),
                                              reducer_.lane_gradient(i),
                                              [&](Range range) { reducer_.ready(i, range); });
    reducer_.lane_done(i, {sum.loss, static_cast<double>(sum.tokens)});
  }
  const ReducedStep reduced = reducer_.finish(Deadline::after(std::chrono::hours(1)));
  const double norm = std::sqrt(sum_of_squares(reduced.gradient, pool_, block_sums_));
  if (!std::isfinite(norm) || !std::isfinite(reduced.tail.loss)) halt(reduced);

  StepReport report;
  report.tokens = static_cast<std::int64_t>(reduced.tail.tokens);
  report.loss = reduced.tail.loss / reduced.tail.tokens;
  report.gradient_norm = norm / reduced.tail.tokens;
  report.learning_rate = learning_rate(options_.schedule, step_);
  const float factor = gradient_factor(norm, report.tokens, options_.clip);
  adamw_.step(parameters_.span(), reduced.gradient, factor, report.learning_rate, step_, pool_);
  report.step = ++step_;
  report.epoch = lanes_.epochs(static_cast<std::uint64_t>(step_));
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

std::optional<double> Trainer::evaluate() {
  const std::uint64_t count = std::min(options_.eval_samples, validation_.size());
  if (count == 0) return std::nullopt;
  const auto context = static_cast<std::size_t>(validation_.context());
  LossSum sum;
  for (std::uint64_t first = 0; first < count; first += options_.micro_batch) {
    const std::size_t rows = std::min(options_.micro_batch, count - first);
    for (std::size_t row = 0; row < rows; ++row) {  // spread evenly
      validation_.read((first + row) * validation_.size() / count,
                       std::span(tokens_).subspan(row * context, context),
                       std::span(targets_).subspan(row * context, context));
    }
    const Batch batch = {std::span(tokens_).first(rows * context),
                         std::span(targets_).first(rows * context), static_cast<int>(rows),
                         validation_.context()};
    const LossSum part = transformer_.loss(parameters_.span(), batch);
    sum.loss += part.loss;
    sum.tokens += part.tokens;
  }
  return sum.loss / static_cast<double>(sum.tokens);
}

void Trainer::run(const std::atomic<int>& stop,
                  const std::function<void(const StepReport&)>& report) {
  while (step_ < options_.schedule.steps && stop.load() == 0) {
    StepReport done = step();
    const bool last = step_ == options_.schedule.steps || stop.load() != 0;
    if (last || (options_.eval_every > 0 && step_ % options_.eval_every == 0)) {
      done.validation_loss = evaluate();
    }
    report(done);
  }
}

// Lanes are pure functions, so the culprit is found by computing them once more, one by one.
void Trainer::halt(const ReducedStep& reduced) {
  const auto fail = [&](const std::string& what) {
    throw Error(ErrorCode::kNonFinite,
                fmt::format("step {}: {}; no weights were changed", step_ + 1, what));
  };
  if (const auto bad = name_non_finite(layout(), parameters_.span())) fail("weight " + *bad);
  const auto sum_is_bad = name_non_finite(layout(), reduced.gradient);
  for (std::uint32_t lane = 0; lane < lanes_.lanes(); ++lane) {
    const std::span<float> gradient = reducer_.lane_gradient(0);
    const LossSum sum = transformer_.gradient(parameters_.span(), lane_batch(lane), gradient, {});
    const std::string who = fmt::format("lane {} (samples {})", lane, list_of(sample_ids_));
    if (const auto bad = name_non_finite(layout(), gradient)) {
      fail(fmt::format("{}: the gradient of {}", who, *bad));
    }
    if (!std::isfinite(sum.loss)) fail(fmt::format("{}: the loss is {}", who, sum.loss));
  }
  fail(fmt::format("the lanes are finite, but their sum is not: the gradient of {}",
                   sum_is_bad.value_or("nothing")));
  std::abort();  // fail() throws
}

}  // namespace lockstep
