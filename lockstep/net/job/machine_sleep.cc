#include "lockstep/net/job/machine_sleep.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace lockstep {
namespace {

std::chrono::nanoseconds read(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
}

// In this order: a process that is stopped in between has stood still, and may be told so.
std::chrono::nanoseconds slept_since_boot() {
  const auto awake = read(CLOCK_MONOTONIC);
  return read(CLOCK_BOOTTIME) - awake;
}

}  // namespace

MachineSleep::MachineSleep() : before_(slept_since_boot()) {}

Deadline::Clock::duration MachineSleep::take() {
  const Deadline::Clock::duration now = slept_since_boot();
  return std::max(Deadline::Clock::duration::zero(), now - std::exchange(before_, now));
}

}  // namespace lockstep
