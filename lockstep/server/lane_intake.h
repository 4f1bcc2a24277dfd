#pragma once

#include "lockstep/server/frame_socket.h"
#include "lockstep/server/lane_step.h"
#include "lockstep/server/lane_tree.h"

namespace lockstep {

// Bytes that a worker has not taken yet; with more, no new piece is begun and nothing is passed on.
inline constexpr std::size_t kMostQueued = std::size_t{4} << 20;

// The PartialSums of one worker, on their way from its connection into a LaneStep.
class LaneIntake {
 public:
  // The open PartialSum belongs to the open piece.
  bool accepted() const { return accepted_; }
  // Takes what is there of the open PartialSum. Whether all of it has been added; if not, more has
  // to come, or the open piece has to be finished first. Throws what LaneStep throws.
  bool take(LaneStep& step, int worker, FrameSocket& frames);

 private:
  bool accepted_ = false;
  LaneValue value_;
};

// A finished piece as it goes back to all workers. The frame may be queued any number of times.
FrameSocket::Outgoing raw_sum_frame(const LaneStep::Piece& piece);

}  // namespace lockstep
