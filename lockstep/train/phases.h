#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string_view>

#include "lockstep/base/index.h"

namespace lockstep {

// Where the time of a step goes.
enum class Phase : std::uint8_t {
  kData,
  kForward,
  kBackward,
  kCommunication,  // that the backward pass did not hide
  kOptimizer,
  kVerify,
  kSave,
};
inline constexpr std::size_t kPhases = 7;
std::string_view to_string(Phase phase);

// Seconds, by phase.
class PhaseTimes {
 public:
  double& operator[](Phase phase) { return seconds_[index_of(phase)]; }
  double operator[](Phase phase) const { return seconds_[index_of(phase)]; }
  std::span<double, kPhases> all() { return seconds_; }
  std::span<const double, kPhases> all() const { return seconds_; }
  // What a rank does by itself.
  double compute() const {
    return (*this)[Phase::kData] + (*this)[Phase::kForward] + (*this)[Phase::kBackward];
  }

 private:
  std::array<double, kPhases> seconds_{};
};

// Adds the time from its making to its end to a phase.
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
  double slower = 0;  // than the median rank, as a share: 0.5 takes half as long again
};
// The slowest rank, if it is slower than the median of the others by more than `share`.
std::optional<Straggler> find_straggler(std::span<const double> seconds_by_rank, double share);

}  // namespace lockstep
