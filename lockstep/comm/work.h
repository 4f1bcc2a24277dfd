#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/comm/call.h"

namespace lockstep {

class Supervisor;

// The state that a collective under way shares with its handle.
struct WorkState {
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;           // guarded by mutex
  Outcome outcome;             // guarded by mutex
  std::optional<Error> error;  // guarded by mutex
};

// The handle of a collective that start() began. Move-only. Destroying the handle does not stop the
// collective: its buffers stay in use until the collective has ended.
class Work {
 public:
  Work() = default;
  Work(std::shared_ptr<WorkState> state, Supervisor* supervisor, std::string description);
  Work(Work&&) = default;
  Work& operator=(Work&&) = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  bool valid() const { return state_ != nullptr; }
  bool done() const;
  // Waits until then; whether the collective has ended. Aborts nothing.
  bool wait_until(Deadline deadline) const;
  // Returns when the collective has ended, or throws its error. At the deadline it aborts the
  // group, so that the buffers are free when it throws.
  Outcome wait(Deadline deadline);

 private:
  std::shared_ptr<WorkState> state_;
  Supervisor* supervisor_ = nullptr;
  std::string description_;
};

}  // namespace lockstep
