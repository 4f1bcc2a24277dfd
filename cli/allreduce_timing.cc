#include "cli/allreduce_timing.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cli/allreduce_pattern.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/calls.h"

namespace lockstep::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr std::size_t kMostWithoutBarrier = 64 * 1024;
constexpr int kFewestIterations = 3;
constexpr int kMostIterations = 20000;

class AllReduceTimer {
 public:
  AllReduceTimer(Communicator& communicator, std::size_t bytes, const TimingOptions& options)
      : communicator_(communicator),
        options_(options),
        pattern_(options.type, communicator.rank(), communicator.world_size()),
        memory_(options.plain_memory ? Buffer::heap(bytes) : communicator.allocate(bytes)),
        data_(memory_.data(), bytes / size_of(options.type), options.type) {
    call_options_.algorithm = options.algorithm;
  }

  Timing run() {
    Timing timing;
    timing.algorithm = chosen_algorithm();
    iterate();
    timing.correct = check();

    std::vector<double> times(static_cast<std::size_t>(choose_iterations()));
    for (double& time : times) time = iterate();
    timing.correct = check() && timing.correct;

    communicator_.all_reduce(std::span(times), ReduceOp::kMax);
    std::ranges::sort(times);
    timing.least = Seconds(times.front());
    timing.median = Seconds(times[times.size() / 2]);
    timing.p99 = Seconds(times[times.size() * 99 / 100]);
    return timing;
  }

 private:
  Algorithm chosen_algorithm() {
    Call call = calls::all_reduce(data_, ReduceOp::kSum, call_options_);
    complete_call(call, communicator_.rank(), communicator_.world_size());
    return communicator_.algorithm_for(call);
  }

  // In seconds, on this rank.
  double iterate() {
    pattern_.write_input(data_);
    if (data_.bytes() > kMostWithoutBarrier) communicator_.barrier();
    const auto start = Clock::now();
    communicator_.all_reduce(data_, ReduceOp::kSum, call_options_);
    return Seconds(Clock::now() - start).count();
  }

  bool check() {
    const auto wrong = pattern_.find_difference(data_);
    if (wrong) {
      log(LogLevel::kError, "all_reduce of {} bytes: element {} is wrong on rank {}", data_.bytes(),
          *wrong, communicator_.rank());
    }
    std::vector<std::int32_t> right = {wrong ? 0 : 1};
    communicator_.all_reduce(std::span(right), ReduceOp::kMin);
    return right[0] == 1;
  }

  // Warms up; rank 0's estimate holds for all.
  int choose_iterations() {
    const int trials = data_.bytes() <= kMostWithoutBarrier ? 50 : 2;
    const auto start = Clock::now();
    for (int i = 0; i < trials; ++i) iterate();
    const double each = Seconds(Clock::now() - start).count() / trials;
    std::vector<std::int32_t> chosen = {options_.iterations.value_or(
        static_cast<int>(std::clamp(Seconds(options_.duration).count() / each,
                                    double{kFewestIterations}, double{kMostIterations})))};
    communicator_.broadcast(std::span(chosen), 0);
    return chosen[0];
  }

  Communicator& communicator_;
  const TimingOptions& options_;
  const AllReducePattern pattern_;
  const Buffer memory_;
  const BufferView data_;
  CallOptions call_options_;
};

}  // namespace

Timing time_all_reduce(Communicator& communicator, std::size_t bytes,
                       const TimingOptions& options) {
  return AllReduceTimer(communicator, bytes, options).run();
}

}  // namespace lockstep::cli
