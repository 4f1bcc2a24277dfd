#pragma once

#include <algorithm>
#include <chrono>
#include <ctime>

namespace lockstep {

// An absolute point on the steady clock by which a blocking call must return. Passed by value.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // A duration too long for the clock means the end of time.
  static Deadline after(Clock::duration duration) {
    const auto now = Clock::now();
    if (duration > Clock::time_point::max() - now) return Deadline(Clock::time_point::max());
    return Deadline(now + duration);
  }
  // The same from a clock that is cheaper to read and up to a few milliseconds late: for limits of
  // seconds on calls that may take less than a microsecond.
  static Deadline roughly_after(Clock::duration duration) {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    const auto since_boot =
        std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
    const Clock::time_point point{since_boot};
    if (duration > Clock::time_point::max() - point) return Deadline(Clock::time_point::max());
    return Deadline(point + duration);
  }
  static Deadline at(Clock::time_point time) { return Deadline(time); }

  Clock::time_point time() const { return time_; }
  bool expired() const { return Clock::now() >= time_; }

  // Never negative.
  Clock::duration remaining() const {
    return std::max(Clock::duration::zero(), time_ - Clock::now());
  }

  // What is left, rounded up to milliseconds and cut at `most`: the timeout of one poll().
  int poll_timeout(std::chrono::milliseconds most = std::chrono::hours(1)) const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(remaining());
    return static_cast<int>(std::min(left, most).count());
  }

  friend Deadline earlier(Deadline a, Deadline b) { return Deadline(std::min(a.time_, b.time_)); }

 private:
  explicit Deadline(Clock::time_point time) : time_(time) {}

  Clock::time_point time_;
};

// For code that judges the silence of others by `timeout` and looks several times in it. If the
// last look was far longer ago, this process itself stood still and can have heard nobody. Returns
// `since`, from which the silence counts, moved on by as long.
inline Deadline::Clock::time_point excuse_own_pause(Deadline::Clock::time_point since,
                                                    Deadline::Clock::time_point last_look,
                                                    Deadline::Clock::time_point now,
                                                    Deadline::Clock::duration timeout) {
  const auto slept = now - last_look;
  return slept > timeout / 2 ? std::min(now, since + slept) : since;
}

}  // namespace lockstep
