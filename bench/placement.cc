// How far apart two cores are now: nanoseconds for a cache line to go from one to the other. On
// virtual machines this changes within seconds, and with it every result between two processes.
#include <thread>

#include "bench/common.h"

namespace {

struct Line {
  alignas(128) std::atomic<int> value{0};
};

void pin_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  ::sched_setaffinity(0, sizeof set, &set);
}

}  // namespace

int main() {
  constexpr int kRounds = 200;
  constexpr int kTrips = 100;
  if (std::thread::hardware_concurrency() < 2) {
    std::printf("0\n");
    return 0;
  }
  Line there;
  Line back;
  std::thread other([&] {
    pin_to(1);
    for (int i = 1; i <= kRounds * kTrips; ++i) {
      while (there.value.load(std::memory_order_acquire) != i) {
      }
      back.value.store(i, std::memory_order_release);
    }
  });
  pin_to(0);
  std::vector<double> rounds;
  int i = 0;
  for (int round = 0; round < kRounds; ++round) {
    const double start = bench::now();
    for (int trip = 0; trip < kTrips; ++trip) {
      there.value.store(++i, std::memory_order_release);
      while (back.value.load(std::memory_order_acquire) != i) {
      }
    }
    rounds.push_back((bench::now() - start) / (2 * kTrips));
  }
  other.join();
  std::sort(rounds.begin(), rounds.end());
  std::printf("%.0f\n", rounds[rounds.size() / 2] * 1e9);
}
