#include "lockstep/comm/mpi/call.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <string_view>
#include <thread>

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// One for the process, as MPI is.
std::mutex call_mutex;
std::atomic<bool> calls_serialized{true};

constexpr std::chrono::nanoseconds kSpinTime = 200us;
constexpr auto kSlowestByte = 4ns;  // shared among more ranks than cores

}  // namespace

std::unique_lock<std::mutex> mpi_lock() {
  if (!calls_serialized.load(std::memory_order_relaxed)) return {};
  return std::unique_lock(call_mutex);
}

void set_mpi_serialized(bool serialized) { calls_serialized = serialized; }

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(
      ErrorCode::kIo,
      fmt::format("{}: {}", call, std::string_view(text, static_cast<std::size_t>(length))));
}

bool test(MPI_Request& request) {
  int done = 0;
  const auto lock = mpi_lock();
  check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
  return done != 0;
}

bool await(MPI_Request& request, const Patience& patience) {
  const auto start = Deadline::Clock::now();
  const auto spin = kSpinTime + patience.bytes * kSlowestByte;
  while (!test(request)) {
    if (patience.latch != nullptr) patience.latch->check();
    const auto now = Deadline::Clock::now();
    if (now >= patience.deadline.time()) return false;
    const auto waited = now - start;
    if (waited > spin) {
      std::this_thread::sleep_for(
          std::clamp<std::chrono::nanoseconds>((waited - spin) / 16, kShortestNap, kLongestNap));
    } else if (patience.oversubscribed) {
      ::sched_yield();
    }
  }
  return true;
}

}  // namespace lockstep
