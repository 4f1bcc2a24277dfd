#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/call.h"
#include "lockstep/net/job/supervisor.h"

namespace lockstep {

// The state that a collective under way shares with its handle.
struct WorkState {
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;           // guarded by mutex
  Outcome outcome;             // guarded by mutex
  std::optional<Error> error;  // guarded by mutex
};

// Handle of a collective under way. Move-only. Letting it go does not stop the collective, and its
// buffers stay in use until it has ended.
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
  // Returns when the collective has ended, or throws its error. At the deadline it aborts the
  // group, so that the buffers are free when it throws.
  Outcome wait(Deadline deadline);

 private:
  std::shared_ptr<WorkState> state_;
  Supervisor* supervisor_ = nullptr;
  std::string description_;
};

}  // namespace lockstep
