#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/server/lane_tree.h"
#include "lockstep/wire/gradient_messages.h"

namespace lockstep {

// Sums over lanes, as the gradient server sees them. Workers send partials, the sums of nodes of
// T(0, lanes), in pieces of the flat gradient. The first frame of a piece opens the piece. A piece
// is finished when the nodes that have come cover all lanes, whoever brought them. No I/O. A frame
// that does not fit throws an Error that names the worker at fault.
class LaneStep {
 public:
  // One step of a job whose steps the server deals out; the piece that has a tail ends the step.
  LaneStep(std::uint64_t step, std::vector<std::string> names);
  // All sums of ranks, which number their steps themselves; done() never comes.
  explicit LaneStep(std::vector<std::string> names);

  // Whether the frame belongs to the open piece, or opens one. If not, the frame is to be offered
  // again when the piece is finished.
  bool offer(int worker, const BulkHead& head);
  // All of a frame that was accepted.
  void add(int worker, const BulkHead& head, LaneValue value);
  // Throws if all workers have gone on to other pieces: nothing can finish the open one.
  void check_stuck() const;

  struct Piece {
    BulkHead head;  // of the RawSum
    LaneValue sum;
  };
  // The finished piece, once; the next may then be opened.
  std::optional<Piece> take_finished();
  // A frame of the step has been accepted.
  bool begun() const { return begun_; }
  bool done() const { return done_; }
  // "lanes [4, 8) of step 3, elements from 65536 on"; what is missing first.
  std::string missing() const;

 private:
  struct Open {
    BulkHead head;  // that opened it
    int opener = -1;
    LaneTree tree;
  };

  [[noreturn]] void fail(ErrorCode code, int worker, const std::string& what) const;
  void check_step(int worker, const BulkHead& head) const;
  void check_finite(int worker, const BulkHead& head, const LaneValue& value) const;

  // Where a frame that was put off belongs.
  struct Place {
    std::uint64_t step = 0;
    std::uint64_t offset = 0;
  };

  const std::optional<std::uint64_t> only_step_;
  const std::vector<std::string> names_;
  std::optional<Open> open_;
  std::vector<std::optional<Place>> waiting_at_;
  bool begun_ = false;
  bool done_ = false;
};

}  // namespace lockstep
