#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/lockstep.h"
#include "lockstep/report/run_events.h"
#include "lockstep/train/killing_lanes.h"

namespace lockstep {

// Who went and who came, kept from one generation to the next until people are told: a generation
// may end before all its ranks stand at the same step. Pure. One thread.
class RosterNews {
 public:
  // From generation `generation`, whose lanes were `owners`' (none if none were dealt), to one
  // whose last members are `came`.
  void note(const std::vector<Job::Departure>& gone, std::uint32_t generation,
            const LeafOwners& owners, const std::vector<std::string>& came);
  // Of those that were lost by their own fault, the lanes that they had of step `step`.
  void count_failures(std::int64_t step, KillingLanes& killing) const;

  // How all go on after it.
  struct GoesOn {
    std::int64_t steps = 0;    // that the run has in all
    std::int64_t lost_at = 0;  // steps that this worker had done when the generation before ended
    std::int64_t step = 0;     // steps that all have done now
    bool after_loss = false;
    bool went_back = false;  // to a checkpoint, or to the start: no whole state was left
    // By rank.
    std::vector<std::uint32_t> lanes;
    std::vector<std::string> members;
    double seconds = 0;  // that it took
  };
  // What people are told of it, in the order of RunEvent::Kind. Forgets it.
  std::vector<RunEvent> take_events(const GoesOn& now);

 private:
  struct Gone {
    Job::Departure departure;
    std::uint32_t generation = 0;      // in which it was
    std::vector<std::uint32_t> lanes;  // that it had there
  };
  std::vector<Gone> gone_;
  std::vector<std::string> came_;
};

}  // namespace lockstep
