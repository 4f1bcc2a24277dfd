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

  // `last` is the roster of the last generation and outlives this. `home` is an address where the
  // centre always is, such as a coordinator's; empty: there is none and the role moves.
  Succession(const RosterMessage& last, int own_rank, std::string home, Time now);

  struct Action {
    enum class Kind { kCall, kWait, kServe, kGiveUp } kind{};
    std::string address = {};    // to call
    Time until{};                // of the call, or of the wait
    std::vector<int> lost = {};  // to serve: ranks that are known to be gone
    // To call: who has to answer; another process at that address is nobody. None: anybody may.
    std::optional<MemberId> whom = {};
  };
  // What to do now; `may_serve` is whether this process may become the centre. A call ends in one
  // of the two below, or with the centre.
  Action next(bool may_serve, Time now);
  void unreachable(Time now);
  // Whoever was called is not the centre, but says where it is; empty: it does not know, and looks.
  void redirected(const std::string& address, Time now);

 private:
  const RosterMessage& last_;
  const int own_rank_;
  const std::string home_;
  const Time limit_;  // then it gives up

  int at_ = 0;                       // the rank that is asked
  std::vector<int> gone_;            // ranks that were out of reach
  std::optional<std::string> told_;  // where the centre is said to be
  bool calling_told_ = false;
  Time wait_until_{};
};

}  // namespace lockstep
