#pragma once

#include <cstdint>
#include <optional>

#include "lockstep/base/error.h"

namespace lockstep {

// What the end of a part of a job (a process, a thread, the gradient server) tells of the cause of
// the job's failure. The later the value, the more it tells.
enum class Evidence : std::uint8_t {
  kNone,    // it ended well
  kEcho,    // it failed because of another part, which its error names
  kOwn,     // it failed by itself
  kKilled,  // a signal ended it: that is why others failed
};

// `own_rank` is -1 for a part that is no rank.
inline Evidence evidence_of(const Error& error, int own_rank) {
  return error.rank() >= 0 && error.rank() != own_rank ? Evidence::kEcho : Evidence::kOwn;
}

// Names the part of a job to blame from how its parts ended: the one whose end tells the most,
// among equals the first. A process is gone later than its connections, so the first to end need
// not be the first that failed. What a running job says of itself JobHealth weighs before.
class Blame {
 public:
  // A part has ended. Returns whether it is the culprit, as far as is known now.
  bool add(int part, Evidence evidence) {
    if (evidence <= evidence_) return false;
    evidence_ = evidence;
    culprit_ = part;
    return true;
  }

  std::optional<int> culprit() const {
    return evidence_ == Evidence::kNone ? std::nullopt : std::optional(culprit_);
  }
  Evidence evidence() const { return evidence_; }

 private:
  int culprit_ = -1;
  Evidence evidence_ = Evidence::kNone;
};

}  // namespace lockstep
