// What one record of the flight recorder costs, for bench/observers.py: a phase, and a collective
// as a communicator records it. Prints nanoseconds as JSON: the median of many rounds.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "lockstep/comm/flight_recorder.h"

namespace {

constexpr int kRounds = 201;
constexpr int kRecords = 20'000;

template <typename Body>
double median_ns(Body&& body) {
  std::vector<double> rounds;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kRecords; ++i) body(i);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    rounds.push_back(took.count() / kRecords);
  }
  std::ranges::nth_element(rounds, rounds.begin() + kRounds / 2);
  return rounds[kRounds / 2];
}

}  // namespace

int main() {
  lockstep::FlightRecorder recorder;
  recorder.set_place(0, 2, 1, 1);
  const double phase = median_ns(
      [&](int i) { const lockstep::PhaseRecord record(recorder, "forward and backward", i, i); });
  lockstep::FlightTrack& track = *recorder.take_track(0);
  const double collective = median_ns([&](int i) {
    lockstep::MeshFrame frame;
    frame.sequence = static_cast<std::uint64_t>(i);
    const lockstep::FlightCall call(frame, 1);
    const std::uint64_t number = track.ring.enter(call, recorder.ticks());
    track.ring.leave(number, recorder.ticks(), 0);
  });
  // Nothing was optimised away: the last records are there.
  const lockstep::FlightSnapshot last = recorder.snapshot();
  if (last.phases.empty() || last.collectives.empty() ||
      last.collectives.back().call.sequence != kRecords - 1) {
    std::fprintf(stderr, "the records are not there\n");
    return 1;
  }
  std::printf("{\"phase_ns\": %.1f, \"collective_ns\": %.1f}\n", phase, collective);
  return 0;
}
