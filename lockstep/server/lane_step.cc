#include "lockstep/server/lane_step.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/base/text.h"
#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {
namespace {

std::string node_name(const GradientHead& head) {
  return fmt::format("lanes [{}, {}) of {} at step {}", head.lane_begin, head.lane_end, head.lanes,
                     head.step);
}

}  // namespace

LaneStep::LaneStep(std::uint64_t step, std::vector<std::string> names)
    : step_(step), names_(std::move(names)), waiting_at_(names_.size()) {}

void LaneStep::fail(ErrorCode code, int worker, const std::string& what) const {
  throw Error(code, fmt::format("{} {}", names_[index_of(worker)], what), worker);
}

bool LaneStep::offer(int worker, const GradientHead& head) {
  if (head.tag != WireTag::kPartialSum) {
    fail(ErrorCode::kUnexpectedMessage, worker,
         fmt::format("sent a {}; a {} of step {} is expected", to_string(head.tag),
                     to_string(WireTag::kPartialSum), step_));
  }
  if (head.step != step_) {
    fail(ErrorCode::kStepMismatch, worker,
         fmt::format("sent a PartialSum of step {}; step {} is expected", head.step, step_));
  }
  if (!open_) open_.emplace(Open{head, worker, LaneTree(head.lanes)});
  const GradientHead& first = open_->head;
  const std::string& opener = names_[index_of(open_->opener)];
  if (head.lanes != first.lanes) {
    fail(ErrorCode::kSizeMismatch, worker,
         fmt::format("counts {} lanes at step {}, but {} counts {}", head.lanes, step_, opener,
                     first.lanes));
  }
  if (head.offset != first.offset) {
    waiting_at_[index_of(worker)] = head.offset;
    return false;
  }
  if (head.count != first.count || head.tail_count != first.tail_count) {
    fail(ErrorCode::kSizeMismatch, worker,
         fmt::format("sent {} elements and a tail of {} from element {} on at step {}, but {} sent "
                     "{} and {}",
                     head.count, head.tail_count, head.offset, step_, opener, first.count,
                     first.tail_count));
  }
  waiting_at_[index_of(worker)].reset();
  begun_ = true;
  return true;
}

void LaneStep::check_finite(int worker, const GradientHead& head, const LaneValue& value) const {
  const std::size_t at = find_non_finite(DataType::kF32, value.data.data(), value.data.size());
  if (at < value.data.size()) {
    fail(ErrorCode::kNonFinite, worker,
         fmt::format("sent {} for {}: element {}", value.data[at], node_name(head),
                     head.offset + at));
  }
  const std::size_t bad = find_non_finite(DataType::kF64, value.tail.data(), value.tail.size());
  if (bad < value.tail.size()) {
    fail(ErrorCode::kNonFinite, worker,
         fmt::format("sent {} for {}: number {} of the tail", value.tail[bad], node_name(head),
                     bad));
  }
}

void LaneStep::add(int worker, const GradientHead& head, LaneValue value) {
  LOCKSTEP_CHECK(open_);
  check_finite(worker, head, value);
  switch (open_->tree.add({head.lane_begin, head.lane_end}, std::move(value))) {
    case LaneTree::Outcome::kAdded: break;
    case LaneTree::Outcome::kNoNode:
      fail(ErrorCode::kSizeMismatch, worker,
           fmt::format("sent {}, which is no node of the tree", node_name(head)));
    case LaneTree::Outcome::kOverlaps:
      fail(ErrorCode::kSizeMismatch, worker,
           fmt::format("sent {}, of which some have come already", node_name(head)));
  }
}

void LaneStep::check_stuck() const {
  if (!std::ranges::all_of(waiting_at_, [](const auto& offset) { return offset.has_value(); })) {
    return;
  }
  std::vector<std::string> positions;
  for (std::size_t i = 0; i < names_.size(); ++i) {
    if (waiting_at_[i]) positions.push_back(fmt::format("{} at {}", names_[i], *waiting_at_[i]));
  }
  throw Error(ErrorCode::kSizeMismatch,
              fmt::format("{} can never come: all workers went on to another piece ({})", missing(),
                          list_of(positions)));
}

std::optional<LaneStep::Piece> LaneStep::take_finished() {
  if (!open_ || !open_->tree.complete()) return std::nullopt;
  Piece piece{open_->head, open_->tree.take()};
  piece.head.tag = WireTag::kRawSum;
  done_ = piece.head.tail_count > 0;
  open_.reset();
  waiting_at_.assign(names_.size(), std::nullopt);
  const std::size_t at =
      find_non_finite(DataType::kF32, piece.sum.data.data(), piece.sum.data.size());
  if (at < piece.sum.data.size()) {
    throw Error(ErrorCode::kNonFinite,
                fmt::format("the sum over all lanes of step {} overflows to {}: element {}", step_,
                            piece.sum.data[at], piece.head.offset + at));
  }
  return piece;
}

std::string LaneStep::missing() const {
  if (!open_) return fmt::format("a PartialSum of step {}", step_);
  const auto gap = open_->tree.first_gap();
  if (!gap) return "nothing";
  return fmt::format("lanes [{}, {}) of step {}, elements from {} on", gap->begin, gap->end, step_,
                     open_->head.offset);
}

}  // namespace lockstep
