#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/range.h"
#include "lockstep/server/lane_tree.h"
#include "lockstep/wire/gradient_messages.h"

namespace lockstep {

// Sums over lanes, as the gradient server of ranks sees them. Ranks send partials, the sums of
// nodes of T(0, lanes), in pieces of the flat gradient; they number their sums alike, from 0 on,
// and nobody begins a sum before the one before it has come back. The first frame of a piece opens
// the piece. A piece is finished when the nodes that have come cover all lanes, whoever brought
// them. No I/O. A frame that does not fit throws an Error that names the rank at fault, even if its
// frame was the first. What a rank may bring is bounded: the lanes, and the bytes that are held for
// it.
class LaneSums {
 public:
  explicit LaneSums(std::vector<std::string> names);

  // Whether the frame belongs to the open piece, or opens one. If not, the frame is to be offered
  // again when the piece is finished.
  bool offer(int rank, const BulkHead& head);
  // All of a frame that was accepted. The piece may be finished by now, with others' lanes: then
  // these were brought twice.
  void add(int rank, const BulkHead& head, LaneValue value);
  // Throws if all ranks have gone on to other pieces: nothing can finish the open one.
  void check_stuck() const;

  struct Piece {
    BulkHead head;  // of the RawSum
    LaneValue sum;
  };
  // The finished piece, once; the next may then be opened.
  std::optional<Piece> take_finished();
  // "lanes [4, 8) of sum 3, elements from 65536 on"; what is missing first.
  std::string missing() const;

 private:
  struct Brought {
    Range node;
    int rank = -1;
  };
  struct Open {
    BulkHead head;  // that opened it
    int opener = -1;
    LaneTree tree;
    std::vector<std::size_t> brought;  // bytes, by rank
    std::vector<bool> has_brought;     // anything, by rank
    std::vector<Brought> nodes;        // in the order in which they came
  };
  // Of a piece.
  struct Place {
    std::uint64_t step = 0;
    std::uint64_t offset = 0;

    bool operator==(const Place&) const = default;
  };
  static Place place_of(const BulkHead& head) { return {head.step, head.offset}; }

  [[noreturn]] void fail(ErrorCode code, int rank, const std::string& what) const;
  // Whether a piece can begin there, after all that are finished.
  bool can_come_next(const Place& place) const;
  // Throws unless it is the open piece, or the one after it from a rank that has brought its part.
  void check_place(int rank, const BulkHead& head) const;
  // Some of these lanes of the open piece.
  int who_brought(Range part) const;
  void check_finite(int rank, const BulkHead& head, const LaneValue& value) const;

  const std::vector<std::string> names_;
  std::optional<Open> open_;
  std::vector<std::optional<Place>> waiting_at_;  // by rank: where a frame belongs that was put off
  Place next_;                                    // where the finished pieces end
  bool sum_may_be_over_ = false;                  // then the next sum may begin instead
};

}  // namespace lockstep
