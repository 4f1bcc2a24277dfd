#pragma once

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <list>
#include <type_traits>

#include "lockstep/base/thread.h"

namespace lockstep {

// A fixed set of threads that, together with the caller, work through numbered tasks. One thread
// at a time may call run(); a body must not. The threads have the floating-point mode (rounding,
// denormals) of the thread that made the pool.
class ThreadPool {
 public:
  // The caller of run() counts as one of `threads`, at least 1. Throws Error when the system gives
  // no thread.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(index) or body(index, worker) once for every index in [0, count), on any thread and
  // in any order; `worker` in [0, threads()) tells whose scratch memory to use. Returns when all
  // have ended and their writes are visible. When bodies throw, tasks not yet begun are left out
  // and one of the exceptions reaches the caller. No heap.
  template <typename Body>
  void run(std::size_t count, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_tasks(count, {.call =
                          [](void* context, std::size_t index, int worker) {
                            Plain& call = *static_cast<Plain*>(context);
                            if constexpr (std::invocable<Plain&, std::size_t, int>) {
                              call(index, worker);
                            } else {
                              call(index);
                            }
                          },
                      .context = const_cast<void*>(static_cast<const void*>(&body))});
  }

 private:
  struct Task {
    void (*call)(void* context, std::size_t index, int worker);
    void* context;
  };

  void run_tasks(std::size_t count, Task task);
  void work(int worker);
  bool try_one(int worker);
  void execute(std::size_t index, int worker) noexcept;
  void stop();

  // Of the job under way: the count in the upper half, the next index in the lower. Claiming an
  // index is one compare-and-swap here, and only a claim gives the right to read task_: run()
  // returns when every claimed index is done.
  alignas(64) std::atomic<std::uint64_t> claims_ = 0;
  alignas(64) std::atomic<std::uint32_t> done_ = 0;
  alignas(64) std::atomic<std::uint32_t> wake_ = 0;  // changes with every job and at the end
  std::atomic<bool> stopping_ = false;
  std::atomic<bool> failed_ = false;  // who sets it writes error_
  Task task_ = {};
  std::exception_ptr error_;
  int spins_ = 0;  // constant after construction
  std::list<Thread> workers_;
};

}  // namespace lockstep
