#include "lockstep/base/thread_pool.h"

#include <fmt/format.h>

#include <limits>
#include <system_error>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// About 50 microseconds: longer than the serial code between two jobs of a training step.
constexpr int kSpins = 1500;

void pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  if (threads < 1) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("a pool of {} threads", threads));
  }
  // A spinning thread would keep a working one from its core.
  spins_ = threads <= available_cores() ? kSpins : 0;
  try {
    for (int worker = 1; worker < threads; ++worker) {
      // execute() keeps what a task throws for run().
      workers_.emplace_back().start(
          "a compute thread", [this, worker] { work(worker); }, [](const Error&) {});
    }
  } catch (const Error&) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stopping_.store(true);
  wake_.fetch_add(1);
  wake_.notify_all();
  for (Thread& worker : workers_) worker.join();
}

void ThreadPool::run_tasks(std::size_t count, Task task) {
  if (count == 0) return;
  LOCKSTEP_CHECK(count <= std::numeric_limits<std::uint32_t>::max());
  task_ = task;
  done_.store(0, std::memory_order_relaxed);
  claims_.store(std::uint64_t{count} << 32, std::memory_order_release);
  if (count > 1 && !workers_.empty()) {
    wake_.fetch_add(1);
    wake_.notify_all();
  }
  while (try_one(0)) {
  }
  for (int spin = 0;; ++spin) {
    const std::uint32_t done = done_.load(std::memory_order_acquire);
    if (done == count) break;
    if (spin < spins_) {
      pause();
    } else {
      done_.wait(done, std::memory_order_acquire);
    }
  }
  if (failed_.load(std::memory_order_relaxed)) {
    failed_.store(false, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void ThreadPool::work(int worker) {
  while (true) {
    const std::uint32_t seen = wake_.load();
    if (stopping_.load()) return;
    for (int spin = 0; spin <= spins_ && wake_.load() == seen; ++spin) {
      while (try_one(worker)) spin = 0;
      pause();
    }
    wake_.wait(seen);
  }
}

bool ThreadPool::try_one(int worker) {
  std::uint64_t claims = claims_.load(std::memory_order_acquire);
  std::uint32_t index = 0;
  std::uint32_t count = 0;
  do {
    index = static_cast<std::uint32_t>(claims);
    count = static_cast<std::uint32_t>(claims >> 32);
    if (index == count) return false;
  } while (!claims_.compare_exchange_weak(claims, claims + 1, std::memory_order_acq_rel));
  execute(index, worker);
  // Only the caller of run() waits, and only for the last.
  if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count && worker != 0) done_.notify_one();
  return true;
}

void ThreadPool::execute(std::size_t index, int worker) noexcept {
  if (failed_.load(std::memory_order_relaxed)) return;
  try {
    task_.call(task_.context, index, worker);
  } catch (...) {
    if (!failed_.exchange(true)) error_ = std::current_exception();
  }
}

}  // namespace lockstep
