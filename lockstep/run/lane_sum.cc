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
    Shared(Communicator& communicator, const LeafOwners& owners, std::size_t elements,
           std::size_t numbers_per_lane)
        : tree(
              schedule_lanes(owned_nodes(owners, communicator.rank())), elements,
              [&](std::size_t bytes) { return communicator.allocate(bytes); }, pool),
          reducer(communicator, owners, partials_of(tree), {}),
          numbers(tree.schedule().lanes.size(), std::vector<double>(numbers_per_lane)) {}

    ThreadPool pool{1};
    GradientTree tree;
    GradientReducer reducer;
    std::vector<std::vector<double>> numbers;  // per lane of this worker
  };

  Shared& shared() {
    if (!of_generation) {
      of_generation.emplace(job.communicator(), owners_of_lanes(lanes, elements, job.world_size()),
                            elements, numbers);
    }
    return *of_generation;
  }

  Job& job;
  const std::uint32_t lanes;
  const std::size_t elements;
  const std::size_t numbers;
  std::optional<Shared> of_generation = {};
};

LaneSum::LaneSum(Job& job, std::uint32_t lanes, std::size_t elements, std::size_t numbers)
    : state_(new State{job, lanes, elements, numbers}) {
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

LaneSum::Sum LaneSum::sum(std::int64_t step, const Compute& compute) {
  State::Shared& shared = state_->shared();
  GradientTree& tree = shared.tree;
  shared.reducer.begin(step);
  for (std::size_t i = 0; i < shared.numbers.size(); ++i) {
    const std::span<float> gradient = tree.lane_gradient(i);
    std::vector<double>& numbers = shared.numbers[tree.schedule().lanes[i].place];
    std::ranges::fill(gradient, 0.0F);
    std::ranges::fill(numbers, 0.0);
    compute(tree.schedule().lanes[i].lane, gradient, numbers);
    tree.ready(i, {0, gradient.size()});
  }
  ReducedStep reduced = shared.reducer.finish(shared.numbers);
  if (reduced.withheld > 0) {
    throw Error(ErrorCode::kNonFinite, fmt::format("the gradient of step {} is not finite", step));
  }
  return {reduced.gradient, std::move(reduced.tail)};
}

}  // namespace lockstep
