#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

// Where the threads of a job meet again after one of them was lost. Thread-safe.
class ThreadMeeting {
 public:
  explicit ThreadMeeting(int world_size) : threads_(static_cast<std::size_t>(world_size)) {}

  // A thread's part in a generation.
  struct Place {
    std::uint32_t generation = 0;
    std::unique_ptr<Transport> transport;
    // The ranks that were in the generation before only, and why they have gone.
    std::vector<std::pair<int, std::string>> departed;
  };
  // Waits until all threads that have not left are here. Who has not come by the deadline is taken
  // to be stuck, and left behind.
  Place regroup(int thread, Deadline deadline);
  // A thread ends, which had this rank; no reason: in good order.
  void leave(int thread, int rank, const std::string& why);

 private:
  struct Member {
    bool came = false;
    bool left = false;
    Place next;
  };

  bool all_came() const;
  void form();

  std::mutex mutex_;
  std::condition_variable formed_;
  std::uint32_t generation_ = 1;                       // guarded by mutex_
  std::vector<Member> threads_;                        // guarded by mutex_
  std::vector<std::pair<int, std::string>> departed_;  // guarded by mutex_; since the last one
};

}  // namespace lockstep
