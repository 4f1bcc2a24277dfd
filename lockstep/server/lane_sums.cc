#include "lockstep/server/lane_sums.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/index.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {
namespace {

// Of a partial sum, and of its tail.
constexpr std::size_t kMostPieceBytes = std::size_t{4} << 20;
constexpr std::size_t kMostTailBytes = 16 * 1024;
// Of a step; nobody cuts a step into so many.
constexpr std::uint32_t kMostLanes = std::uint32_t{1} << 24;
// What a rank may bring to one piece. Honest ranks own few nodes, and pieces are small.
constexpr std::size_t kMostBroughtBytes = std::size_t{1} << 30;
// What a node takes beside its numbers, of which it may have none.
constexpr std::size_t kNodeBytes = 256;

std::string node_name(const BulkHead& head) {
  return fmt::format("lanes [{}, {}) of {} in sum {}", head.lane_begin, head.lane_end, head.lanes,
                     head.step);
}

}  // namespace

LaneSums::LaneSums(std::vector<std::string> names)
    : names_(std::move(names)), waiting_at_(names_.size()) {}

void LaneSums::fail(ErrorCode code, int rank, const std::string& what) const {
  throw Error(code, fmt::format("{} {}", names_[index_of(rank)], what), rank);
}

bool LaneSums::can_come_next(const Place& place) const {
  return place == next_ || (sum_may_be_over_ && place == Place{next_.step + 1, 0});
}

void LaneSums::check_place(int rank, const BulkHead& head) const {
  const Place place = place_of(head);
  const auto in_words = [](const Place& at) {
    return fmt::format("sum {}, elements from {} on", at.step, at.offset);
  };
  if (!open_ && can_come_next(place)) return;
  if (open_) {
    const Place open = place_of(open_->head);
    const bool ahead = place == Place{open.step, open.offset + open_->head.count};
    if (place == open || (ahead && open_->has_brought[index_of(rank)])) return;
    // Only the ranks know how long a sum is.
    if (can_come_next(place)) {
      throw Error(ErrorCode::kStepMismatch,
                  fmt::format("{} is at {}, but {} is at {}", names_[index_of(rank)],
                              in_words(place), names_[index_of(open_->opener)], in_words(open)));
    }
  }
  fail(ErrorCode::kStepMismatch, rank,
       fmt::format("sent a PartialSum of {}; {} is expected", in_words(place),
                   in_words(open_ ? place_of(open_->head) : next_)));
}

bool LaneSums::offer(int rank, const BulkHead& head) {
  if (head.tag != WireTag::kPartialSum) {
    fail(ErrorCode::kUnexpectedMessage, rank,
         fmt::format("sent a {}; a {} is expected", to_string(head.tag),
                     to_string(WireTag::kPartialSum)));
  }
  check_place(rank, head);
  if (head.count > kMostPieceBytes / sizeof(float) || foot_bytes(head) > kMostTailBytes) {
    fail(ErrorCode::kMessageTooLarge, rank,
         fmt::format(
             "sent a PartialSum of {} elements and a tail of {}; {} and {} bytes are allowed",
             head.count, head.tail_count, kMostPieceBytes, kMostTailBytes));
  }
  if (head.lanes == 0 || head.lanes > kMostLanes) {
    fail(ErrorCode::kSizeMismatch, rank,
         fmt::format("counts {} lanes in sum {}; 1 to {} are possible", head.lanes, head.step,
                     kMostLanes));
  }
  if (!open_) {
    open_.emplace(Open{head,
                       rank,
                       LaneTree(head.lanes),
                       std::vector<std::size_t>(names_.size()),
                       std::vector<bool>(names_.size()),
                       {}});
  }
  const BulkHead& first = open_->head;
  const std::string& opener = names_[index_of(open_->opener)];
  if (head.call != first.call) {
    fail(ErrorCode::kCollectiveMismatch, rank,
         fmt::format("is in another collective than {}", opener));
  }
  if (head.lanes != first.lanes) {
    fail(ErrorCode::kSizeMismatch, rank,
         fmt::format("counts {} lanes in sum {}, but {} counts {}", head.lanes, head.step, opener,
                     first.lanes));
  }
  if (head.offset != first.offset) {
    waiting_at_[index_of(rank)] = place_of(head);
    return false;
  }
  if (head.count != first.count || head.tail_count != first.tail_count) {
    fail(ErrorCode::kSizeMismatch, rank,
         fmt::format("sent {} elements and a tail of {} from element {} on in sum {}, but {} sent "
                     "{} and {}",
                     head.count, head.tail_count, head.offset, head.step, opener, first.count,
                     first.tail_count));
  }
  waiting_at_[index_of(rank)].reset();
  open_->has_brought[index_of(rank)] = true;
  std::size_t& brought = open_->brought[index_of(rank)];
  brought += head.count * sizeof(float) + foot_bytes(head) + kNodeBytes;
  if (brought > kMostBroughtBytes) {
    fail(ErrorCode::kMessageTooLarge, rank,
         fmt::format("sent {} bytes for the elements from {} on of sum {}; {} are allowed", brought,
                     head.offset, head.step, kMostBroughtBytes));
  }
  return true;
}

void LaneSums::check_finite(int rank, const BulkHead& head, const LaneValue& value) const {
  const std::size_t at = find_non_finite(DataType::kF32, value.data.data(), value.data.size());
  if (at < value.data.size()) {
    fail(ErrorCode::kNonFinite, rank,
         fmt::format("sent {} for {}: element {}", value.data[at], node_name(head),
                     head.offset + at));
  }
  const std::size_t bad = find_non_finite(DataType::kF64, value.tail.data(), value.tail.size());
  if (bad < value.tail.size()) {
    fail(ErrorCode::kNonFinite, rank,
         fmt::format("sent {} for {}: number {} of the tail", value.tail[bad], node_name(head),
                     bad));
  }
}

void LaneSums::add(int rank, const BulkHead& head, LaneValue value) {
  if (!open_ || place_of(open_->head) != place_of(head)) {
    fail(ErrorCode::kSizeMismatch, rank,
         fmt::format("sent {}, but others have sent all lanes already", node_name(head)));
  }
  check_finite(rank, head, value);
  const Range node = {head.lane_begin, head.lane_end};
  switch (open_->tree.add(node, std::move(value))) {
    case LaneTree::Outcome::kAdded: open_->nodes.push_back({node, rank}); break;
    case LaneTree::Outcome::kNoNode:
      fail(ErrorCode::kSizeMismatch, rank,
           fmt::format("sent {}, which is no node of the tree", node_name(head)));
    case LaneTree::Outcome::kOverlaps:
      fail(ErrorCode::kSizeMismatch, rank,
           fmt::format("sent {}, of which {} has brought some already", node_name(head),
                       names_[index_of(who_brought(node))]));
  }
}

int LaneSums::who_brought(Range part) const {
  const auto found = std::ranges::find_if(
      open_->nodes, [&](const Brought& each) { return common_part(each.node, part).size() > 0; });
  return found == open_->nodes.end() ? open_->opener : found->rank;
}

void LaneSums::check_stuck() const {
  if (!std::ranges::all_of(waiting_at_, [](const auto& place) { return place.has_value(); })) {
    return;
  }
  std::vector<std::string> positions;
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (waiting_at_[i]) {
      positions.push_back(fmt::format("{} at {}", names_[i], waiting_at_[i]->offset));
    }
  }
  throw Error(ErrorCode::kSizeMismatch,
              fmt::format("{} can never come: all ranks went on to another piece ({})", missing(),
                          list_of(positions)));
}

std::optional<LaneSums::Piece> LaneSums::take_finished() {
  if (!open_ || !open_->tree.complete()) return std::nullopt;
  Piece piece{open_->head, open_->tree.take()};
  piece.head.tag = WireTag::kRawSum;
  // The last piece of a sum has the tail, if there is any; one without elements is the only one.
  sum_may_be_over_ = piece.head.tail_count == 0 && piece.head.count > 0;
  next_ = sum_may_be_over_ ? Place{piece.head.step, piece.head.offset + piece.head.count}
                           : Place{piece.head.step + 1, 0};
  open_.reset();
  waiting_at_.assign(names_.size(), std::nullopt);
  const std::size_t at =
      find_non_finite(DataType::kF32, piece.sum.data.data(), piece.sum.data.size());
  if (at < piece.sum.data.size()) {
    throw Error(ErrorCode::kNonFinite,
                fmt::format("sum {} over all lanes overflows to {}: element {}", piece.head.step,
                            piece.sum.data[at], piece.head.offset + at));
  }
  return piece;
}

std::string LaneSums::missing() const {
  if (!open_) return "a PartialSum";
  const auto gap = open_->tree.first_gap();
  if (!gap) return "nothing";
  return fmt::format("lanes [{}, {}) of sum {}, elements from {} on", gap->begin, gap->end,
                     open_->head.step, open_->head.offset);
}

}  // namespace lockstep
