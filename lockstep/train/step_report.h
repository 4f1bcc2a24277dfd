#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "lockstep/base/index.h"

namespace lockstep {

// Where the time of a step goes.
enum class Phase : std::uint8_t {
  kData,
  kForward,
  kBackward,
  kCommunication,  // not hidden behind the backward pass
  kOptimizer,
  kVerify,
  kSave,
  kHidden,  // communication behind the backward pass: it takes no time of the step's own
};
inline constexpr std::size_t kPhases = 8;
std::string_view to_string(Phase phase);

// Seconds, by phase.
class PhaseTimes {
 public:
  double& operator[](Phase phase) { return seconds_[index_of(phase)]; }
  double operator[](Phase phase) const { return seconds_[index_of(phase)]; }
  std::span<double, kPhases> all() { return seconds_; }
  std::span<const double, kPhases> all() const { return seconds_; }
  // The phases in which a rank waits for nobody.
  double compute() const {
    return (*this)[Phase::kData] + (*this)[Phase::kForward] + (*this)[Phase::kBackward];
  }

 private:
  std::array<double, kPhases> seconds_{};
};

// A straggler is looked for after every so many steps.
inline constexpr std::int64_t kStragglerWindow = 10;

// Adds its own lifetime to a phase.
class PhaseTimer {
 public:
  PhaseTimer(PhaseTimes& times, Phase phase) : seconds_(times[phase]) {}
  ~PhaseTimer() {
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  double& seconds_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

struct Straggler {
  int rank = 0;
  double slower = 0;  // than the median of the others: 0.5 takes half as long again
};
// The slowest rank, if it is slower than the median of the others by more than `share`.
std::optional<Straggler> find_straggler(std::span<const double> seconds_by_rank, double share);

// What happened in one step. Losses are means per token, in nats.
struct StepReport {
  std::int64_t step = 0;  // steps done, this one included
  double epoch = 0;       // passes over the data
  double loss = 0;
  double gradient_norm = 0;  // of the mean gradient, before clipping
  double learning_rate = 0;
  std::int64_t tokens = 0;
  std::int64_t correct = 0;  // of them: the model held no other token for likelier
  std::optional<double> validation_loss;
  std::optional<double> validation_accuracy;  // the share of tokens that were correct
  bool best = false;                          // the validation loss is the lowest so far
  bool ends_early = false;  // no better one has come for too long: this was the last step
  double seconds = 0;       // of the step, without validation
  // By rank: data, forward and backward of this step, the other phases of the step before (with one
  // worker the optimizer of this step).
  std::vector<PhaseTimes> phases;
  std::optional<Straggler> straggler;  // over the last steps
  std::vector<std::uint32_t> lanes;    // by rank, of this step
  // By rank, of the next step; empty when the lanes stay where they are.
  std::vector<std::uint32_t> next_lanes;
  // What ranks have requested during the step; all ranks do it now. A function of the step's tail,
  // so all ranks have read the same.
  int stop = 0;  // a signal's number
  bool save = false;
  std::uint32_t save_request = 0;  // the job's newest that a step has carried, up to this one
  bool regroup = false;      // newcomers wait: the generation ends here
  std::vector<int> leaving;  // ranks that go now; the others regroup
};

}  // namespace lockstep
