#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>

#include "lockstep/base/deadline.h"
#include "lockstep/base/thread.h"
#include "lockstep/comm/call.h"
#include "lockstep/comm/work.h"
#include "lockstep/wire/mesh_frame.h"

namespace lockstep {

class Supervisor;

// The receives of a group from whichever rank sends a message, and those from named ranks that were
// called while one of the former was waiting. A message goes to the first of them that it fits. A
// thread of its own looks at the senders in turn, more and more seldom while nothing comes.
class AnyReceiver {
 public:
  // Picks the receive for a message with this frame, or null to leave the message where it is.
  using Pick = std::function<const Call*(const MeshFrame& frame)>;
  // The other ranks of the group, as the thread uses them.
  class Senders {
   public:
    virtual ~Senders() = default;
    virtual int count() const = 0;
    // Receives the next message of a rank if it has begun to arrive, no earlier receive from that
    // rank is under way, and `pick` has a receive for it. Waits for no message to begin.
    virtual std::optional<Outcome> receive(int rank, const Pick& pick) = 0;
    // Who was waited for, for an error.
    virtual Error late(const Call& call) const = 0;
  };

  AnyReceiver(Senders& senders, Supervisor& supervisor);
  // Aborts the job if a receive has not ended.
  ~AnyReceiver();
  AnyReceiver(const AnyReceiver&) = delete;
  AnyReceiver& operator=(const AnyReceiver&) = delete;

  // `source` is a rank or kAnySource.
  Work start(Call call, int source, Deadline deadline);
  // Whether no receive is waiting for its message.
  bool idle() const;

 private:
  struct Pending {
    Call call;
    int source;
    Deadline deadline;
    std::shared_ptr<WorkState> state = std::make_shared<WorkState>();

    bool fits(int sender, const MeshFrame& frame) const;
  };

  void serve();
  // Whether a message was received.
  bool look_at_all();
  bool look_at(int sender);
  // Ends all receives with the job's error.
  void end_all(const Error& error);
  std::optional<Error> late() const;
  void end(const Pending& pending, const Outcome& outcome, const std::optional<Error>& error);

  Senders& senders_;
  Supervisor& supervisor_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Pending> waiting_;  // guarded by mutex_; in the order of their calls
  std::size_t unended_ = 0;     // guarded by mutex_; waiting or being received
  bool closing_ = false;        // guarded by mutex_
  Thread thread_;               // guarded by mutex_
  int first_ = 0;               // the thread's: the sender that is looked at first
};

}  // namespace lockstep
