#include <algorithm>
#include <optional>

#include "lockstep/base/index.h"
#include "lockstep/lockstep.h"

namespace lockstep {
namespace {

// All workers get the state of the first of those that have done the most steps; returns how many.
// Collective. What comes is complete before it replaces anything.
std::int64_t level(Communicator& communicator, std::int64_t done,
                   const std::vector<std::span<float>>& state) {
  std::vector<std::int64_t> steps(index_of(communicator.world_size()));
  communicator.all_gather(std::span<const std::int64_t>(&done, 1), std::span(steps));
  const auto furthest = std::ranges::max_element(steps);
  if (std::ranges::min(steps) == *furthest) return *furthest;
  const auto donor = static_cast<int>(furthest - steps.begin());
  std::vector<std::vector<float>> staged;
  for (const std::span<float> part : state) {
    staged.emplace_back(part.begin(), part.end());
    communicator.broadcast(std::span(staged.back()), donor);
  }
  communicator.barrier();
  for (std::size_t i = 0; i < state.size(); ++i) std::ranges::copy(staged[i], state[i].begin());
  return *furthest;
}

// Whether all workers are to form another generation now: rank 0 knows whether newcomers wait.
bool newcomers_wait(Job& job) {
  std::uint8_t wait = job.wishes().regroup ? 1 : 0;
  job.communicator().broadcast(std::span(&wait, 1), 0);
  return wait != 0;
}

}  // namespace

void run_steps(Job& job, std::int64_t steps, const std::vector<std::span<float>>& state,
               const std::function<void(std::int64_t step)>& step) {
  std::int64_t done = 0;
  std::optional<Regroup> next;
  if (job.newcomer()) {
    done = -1;  // it has not even the state of the start
    next = Regroup::kInOrder;
  } else if (job.description().empty()) {
    job.describe({}, 0);
  }
  while (done < steps) {
    try {
      if (next) {
        job.regroup(std::max<std::int64_t>(done, 0), *next);
        next = Regroup::kAfterLoss;  // until all stand at the same step
        done = level(job.communicator(), done, state);
        next.reset();
        if (job.too_few()) next = Regroup::kTooFew;  // waits for others
        continue;
      }
      step(done + 1);
      ++done;
      if (job.generation() > 0 && newcomers_wait(job)) next = Regroup::kInOrder;
    } catch (const Error& error) {
      if (!job.survives(error)) throw;
      next = Regroup::kAfterLoss;
    }
  }
}

}  // namespace lockstep
