#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/wire/join_messages.h"

namespace lockstep {

// Decides whether the members that come to a rendezvous make a job, and gives ranks to those that
// ask for none. No I/O; time is passed in. Used by one thread.
class Gathering {
 public:
  using Time = Deadline::Clock::time_point;

  // `version` is what every card must say; `deadline` is when the centre gives up.
  Gathering(int world_size, std::string version, Time deadline);

  // A member came; it will wait until `gives_up`. An error is for everybody: the job cannot form.
  [[nodiscard]] std::optional<Error> add(const Card& card, Time gives_up);
  // The member went away before the others came; another process may take its place.
  void forget(const Card& card);

  bool empty() const { return present_.empty() && without_rank_.empty(); }
  bool complete() const {
    return static_cast<int>(present_.size() + without_rank_.size()) == world_size_;
  }
  // Once complete. Members that asked for no rank have those that are left, in the order in which
  // they came.
  Roster roster() const;
  // When the first rank, or the centre, gives up.
  Time deadline() const { return deadline_; }
  Error missing() const;

 private:
  int world_size_;
  std::string version_;
  Time deadline_;
  std::map<int, Card> present_;
  std::vector<Card> without_rank_;        // in the order in which they came
  std::map<int, std::string> went_away_;  // names
};

}  // namespace lockstep
