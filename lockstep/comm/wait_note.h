#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace lockstep {

// Which rank this one waits for, and which it has waited for longest in the collective under way.
// Only waits that are long enough to be noted count. One thread notes at a time; any thread, or a
// process that maps the memory, reads. All zeros is the state before the first wait.
class WaitNote {
 public:
  struct Longest {
    int rank = -1;  // of the job; -1: none
    std::uint64_t nanoseconds = 0;
  };

  // From now on this rank waits for `job_rank`; -1: for nobody.
  void set(int job_rank) {
    if (rank() == job_rank) return;
    const std::uint64_t time = now();
    close(time);
    since_.store(time, std::memory_order_relaxed);
    rank_.store(job_rank + 1, std::memory_order_relaxed);
  }
  int rank() const { return rank_.load(std::memory_order_relaxed) - 1; }
  // How long the wait under way has lasted, in nanoseconds.
  std::uint64_t waited() const { return now() - since_.load(std::memory_order_relaxed); }
  // Whether a wait was noted since take_longest().
  bool noted() const {
    return rank_.load(std::memory_order_relaxed) != 0 ||
           longest_rank_.load(std::memory_order_relaxed) != 0;
  }
  // At the end of a collective: ends the wait under way and begins anew.
  Longest take_longest() {
    close(now());
    rank_.store(0, std::memory_order_relaxed);
    const Longest longest{longest_rank_.load(std::memory_order_relaxed) - 1,
                          longest_.load(std::memory_order_relaxed)};
    longest_rank_.store(0, std::memory_order_relaxed);
    longest_.store(0, std::memory_order_relaxed);
    return longest;
  }

 private:
  static std::uint64_t now() {
    const auto time = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(time).count());
  }
  void close(std::uint64_t at) {
    const int rank = rank_.load(std::memory_order_relaxed);
    const std::uint64_t since = since_.load(std::memory_order_relaxed);
    if (rank == 0 || at - since <= longest_.load(std::memory_order_relaxed)) return;
    longest_.store(at - since, std::memory_order_relaxed);
    longest_rank_.store(rank, std::memory_order_relaxed);
  }

  std::atomic<std::int32_t> rank_{0};  // one more than the rank; 0: none
  std::atomic<std::int32_t> longest_rank_{0};
  std::atomic<std::uint64_t> since_{0};
  std::atomic<std::uint64_t> longest_{0};
};

}  // namespace lockstep
