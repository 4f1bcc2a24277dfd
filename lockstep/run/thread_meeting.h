#pragma once

#include <compare>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

// Where the threads of a job meet again after one of them was lost. Thread-safe.
class ThreadMeeting {
 public:
  explicit ThreadMeeting(int world_size);

  // A rank that was in the generation before only.
  struct Departed {
    int rank = 0;
    std::string why;     // empty: it left in good order
    bool stuck = false;  // it did not come, and may still run
    auto operator<=>(const Departed&) const = default;
  };
  // A thread's part in a generation.
  struct Place {
    std::uint32_t generation = 0;
    std::unique_ptr<Transport> transport;
    std::vector<Departed> departed;
  };
  // Waits until all threads that have not left are here. Who has not come by the deadline is taken
  // to be stuck, and left behind: it gets Error{kTimeout} if it comes all the same.
  Place regroup(int thread, Deadline deadline);
  // A thread ends, which had this rank; no reason: in good order.
  void leave(int thread, int rank, const std::string& why);

 private:
  struct Member {
    int rank = 0;  // in the newest generation that it was in
    bool came = false;
    bool left = false;
    Place next;
  };

  bool all_came() const;
  void form();

  std::mutex mutex_;
  std::condition_variable formed_;
  std::uint32_t generation_ = 1;    // guarded by mutex_
  std::vector<Member> threads_;     // guarded by mutex_
  std::vector<Departed> departed_;  // guarded by mutex_; since the last one
};

}  // namespace lockstep
