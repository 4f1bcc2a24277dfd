#pragma once

#include <chrono>
#include <optional>

#include "lockstep/comm/communicator.h"

namespace lockstep::cli {

struct TimingOptions {
  DataType type = DataType::kF32;
  Algorithm algorithm = Algorithm::kAuto;
  bool plain_memory = false;      // ordinary memory instead of Communicator::allocate()
  std::optional<int> iterations;  // otherwise as many as fit into `duration`
  std::chrono::nanoseconds duration = std::chrono::milliseconds(500);
};

struct Timing {
  Algorithm algorithm{};
  std::chrono::duration<double, std::micro> least{}, median{}, p99{};
  bool correct = false;  // every element on every rank, before and after
};

// Times an all-reduce (sum) of `bytes`. Collective; the same result on all ranks. Every iteration
// starts from freshly written input, and its time is that of the slowest rank; writing the input
// is not timed. Above 64 KiB a barrier comes first, because ranks that share a core write one after
// another; below, the barrier would disturb more than it evens out.
Timing time_all_reduce(Communicator& communicator, std::size_t bytes, const TimingOptions& options);

}  // namespace lockstep::cli
