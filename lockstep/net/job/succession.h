#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/wire/join_messages.h"

namespace lockstep {

// Where a member looks for the centre of its job when it has lost the one it had. The ranks of the
// last generation are asked in order; the first that has lost the centre, too, takes its place. A
// member that was itself lost to the others (it stood still for the timeout) never does: it may
// only join a job that lives. Events and the time go in, what to do comes out; no I/O. Used by one
// thread.
class Succession {
 public:
  using Clock = Deadline::Clock;
  using Time = Clock::time_point;

  // `home` is an address where the centre always is, such as a coordinator's; empty: there is none
  // and the role moves.
  Succession(const RosterMessage& last, int own_rank, bool may_serve, std::string home, Time now);

  struct Action {
    enum class Kind { kCall, kWait, kServe, kGiveUp } kind{};
    std::string address = {};    // to call
    Time until{};                // of the call, or of the wait
    std::vector<int> lost = {};  // to serve: ranks that are known to be gone
  };
  // What to do now. A call ends in one of the three below.
  Action next(Time now);
  void unreachable(Time now);
  // Whoever was called is not the centre, but says where it is; empty: it does not know, and looks.
  void redirected(const std::string& address, Time now);

 private:
  Time limit_;  // then it gives up
  Clock::duration timeout_;
  std::string home_;
  struct Candidate {
    int rank;
    std::string address;
    bool gone = false;
  };
  std::vector<Candidate> candidates_;  // in order
  std::size_t at_ = 0;
  const int own_rank_;
  const int centre_rank_;
  std::optional<std::string> told_;  // where the centre is said to be
  bool calling_told_ = false;
  Time wait_until_{};
};

}  // namespace lockstep
