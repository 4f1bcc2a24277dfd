#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace lockstep {

// What a signal that asks to stop means when several come. Tools such as timeout send one signal to
// a process and to its group: the same signal within a second is one. Any thread; calls are safe in
// signal handlers.
class SignalCount {
 public:
  enum class Meaning { kFirst, kSameAgain, kSecond };

  Meaning take(int signal, std::chrono::steady_clock::time_point now) {
    const std::int64_t time = now.time_since_epoch().count();
    std::int64_t no_time = 0;
    time_.compare_exchange_strong(no_time, time);  // before the signal: who sees that reads this
    int none = 0;
    if (first_.compare_exchange_strong(none, signal)) return Meaning::kFirst;
    const auto since = std::chrono::steady_clock::duration(time - time_.load());
    return signal == none && since < std::chrono::seconds(1) ? Meaning::kSameAgain
                                                             : Meaning::kSecond;
  }
  // 0: none has come.
  int first() const { return first_.load(); }
  // When the first one came.
  std::chrono::steady_clock::time_point first_time() const {
    return std::chrono::steady_clock::time_point(std::chrono::steady_clock::duration(time_.load()));
  }

 private:
  std::atomic<int> first_{0};
  std::atomic<std::int64_t> time_{0};
};

}  // namespace lockstep
