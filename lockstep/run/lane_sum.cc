#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/error.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/lockstep.h"
#include "lockstep/run/job_state.h"
#include "lockstep/train/gradient_tree.h"
#include "lockstep/train/reducer.h"

namespace lockstep {
namespace {

LeafOwners owners_of_lanes(std::uint32_t lanes, std::size_t elements, int workers) {
  if (elements == 0)
    throw Error(ErrorCode::kInvalidArgument, "a sum of gradients without elements");
  if (lanes < static_cast<std::uint32_t>(workers)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} lanes are too few for {} workers", lanes, workers));
  }
  return even_owners(lanes, workers);
}

std::vector<std::span<float>> partials_of(GradientTree& tree) {
  std::vector<std::span<float>> partials;
  for (std::size_t i = 0; i < tree.schedule().partials.size(); ++i) {
    partials.push_back(tree.partial(i));
  }
  return partials;
}

}  // namespace

struct LaneSum::State {
  // What belongs to one generation.
  struct Shared {
    Shared(Communicator& communicator, const LeafOwners& owners, const State& state)
        : tree(
              schedule_lanes(owned_nodes(owners, communicator.rank())), state.elements,
              [&](std::size_t bytes) { return communicator.allocate(bytes); }, pool),
          reducer(communicator, owners, partials_of(tree), {.bucket_bytes = state.bucket_bytes}),
          numbers(tree.schedule().lanes.size(), std::vector<double>(state.numbers)) {}

    ThreadPool pool{1};
    GradientTree tree;
    GradientReducer reducer;
    std::vector<std::vector<double>> numbers;  // per lane of this worker, in lane order

    // Of the step under way.
    std::optional<std::int64_t> step;
    std::size_t lane = 0;   // the first that is not ready
    std::size_t final = 0;  // elements of it
  };

  Shared& shared() {
    if (!of_generation) {
      of_generation.emplace(job.communicator(), owners_of_lanes(lanes, elements, job.world_size()),
                            *this);
    }
    return *of_generation;
  }
  // Of a step that is under way. Throws Error{kInvalidArgument} if there is none or no such lane.
  Shared& in_step(const char* call, std::size_t index) {
    Shared& now = shared();
    if (!now.step) refuse(call, "begin() comes first");
    if (index >= now.numbers.size()) {
      refuse(call, fmt::format("this worker has {} lanes, not {}", now.numbers.size(), index + 1));
    }
    return now;
  }
  Shared& when_all_are_ready(const char* call) {
    Shared& now = in_step(call, 0);
    if (now.lane < now.numbers.size()) {
      refuse(call, fmt::format("only {} of {} lanes are ready", now.lane, now.numbers.size()));
    }
    return now;
  }
  [[noreturn]] static void refuse(const char* call, const std::string& why) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("LaneSum::{}: {}", call, why));
  }

  Job& job;
  const std::uint32_t lanes;
  const std::size_t elements;
  const std::size_t numbers;
  const std::size_t bucket_bytes;
  std::optional<Shared> of_generation = {};
};

LaneSum::LaneSum(Job& job, std::uint32_t lanes, std::size_t elements, std::size_t numbers,
                 std::size_t bucket_bytes)
    : state_(new State{job, lanes, elements, numbers, bucket_bytes}) {
  if (!job.newcomer()) state_->shared();
  job.state_->before_regroup.push_back([weak = std::weak_ptr(state_)] {
    const auto state = weak.lock();
    if (state) state->of_generation.reset();
    return state != nullptr;
  });
}
LaneSum::~LaneSum() = default;
LaneSum::LaneSum(LaneSum&& other) noexcept = default;
LaneSum& LaneSum::operator=(LaneSum&& other) noexcept = default;

std::vector<std::uint32_t> LaneSum::own_lanes() {
  std::vector<std::uint32_t> lanes;
  for (const LaneWork& work : state_->shared().tree.schedule().lanes) lanes.push_back(work.lane);
  return lanes;
}

void LaneSum::begin(std::int64_t step) {
  State::Shared& shared = state_->shared();
  state_->job.communicator().check();
  if (shared.reducer.under_way()) {
    State::refuse("begin", fmt::format("step {} is not finished", *shared.step));
  }
  shared.reducer.begin(step);
  shared.step = step;
  shared.lane = 0;
  shared.final = 0;
  for (std::vector<double>& numbers : shared.numbers) std::ranges::fill(numbers, 0.0);
}

std::span<float> LaneSum::lane_gradient(std::size_t index) {
  return state_->in_step("lane_gradient", index).tree.lane_gradient(index);
}

std::span<double> LaneSum::lane_numbers(std::size_t index) {
  State::Shared& shared = state_->in_step("lane_numbers", index);
  return shared.numbers[shared.tree.schedule().lanes[index].place];
}

void LaneSum::ready(std::size_t index, Range range) {
  State::Shared& shared = state_->in_step("ready", index);
  if (index != shared.lane || range.begin != shared.final || range.end < range.begin ||
      range.end > state_->elements) {
    State::refuse("ready", fmt::format("elements {} to {} of lane {} came where those from {} on "
                                       "of lane {} were expected; there are {}",
                                       range.begin, range.end, index, shared.final, shared.lane,
                                       state_->elements));
  }
  shared.tree.ready(index, range);
  const bool last = index + 1 == shared.numbers.size();
  if (last) shared.reducer.ready(range);
  shared.final = range.end;
  if (shared.final < state_->elements) return;
  ++shared.lane;
  shared.final = 0;
}

bool LaneSum::wait_until(Deadline deadline) {
  return state_->when_all_are_ready("wait_until").reducer.wait_until(deadline);
}

LaneSum::Sum LaneSum::finish() {
  State::Shared& shared = state_->when_all_are_ready("finish");
  ReducedStep reduced = shared.reducer.finish(shared.numbers);
  const std::int64_t step = *std::exchange(shared.step, std::nullopt);
  if (reduced.withheld > 0) {
    throw Error(ErrorCode::kNonFinite, fmt::format("the gradient of step {} is not finite", step));
  }
  return {shared.tree.partial(0), std::move(reduced.tail)};
}

LaneSum::Sum LaneSum::sum(std::int64_t step, const Compute& compute) {
  const std::vector<std::uint32_t> lanes = own_lanes();
  begin(step);
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    const std::span<float> gradient = lane_gradient(i);
    std::ranges::fill(gradient, 0.0F);
    compute(lanes[i], gradient, lane_numbers(i));
    ready(i, {0, gradient.size()});
  }
  return finish();
}

}  // namespace lockstep
