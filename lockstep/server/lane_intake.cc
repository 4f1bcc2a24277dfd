#include "lockstep/server/lane_intake.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace lockstep {

bool LaneIntake::take(LaneStep& step, int worker, FrameSocket& frames) {
  if (!accepted_) {
    if (!step.offer(worker, frames.head())) return false;
    accepted_ = true;
    value_.data.reserve(static_cast<std::size_t>(frames.head().count));
  }
  const std::size_t count = frames.elements_here();
  if (count > 0) {
    const std::size_t before = value_.data.size();
    value_.data.resize(before + count);
    std::copy_n(frames.elements(), count * sizeof(float),
                std::as_writable_bytes(std::span(value_.data)).data() + before * sizeof(float));
    frames.consume_elements(count);
  }
  if (frames.elements_left() > 0) return false;
  const BulkHead head = frames.head();
  auto foot = frames.take_foot();
  if (!foot) return false;
  accepted_ = false;
  value_.tail = std::move(foot->tail);
  step.add(worker, head, std::exchange(value_, {}));
  return true;
}

FrameSocket::Outgoing raw_sum_frame(const LaneStep::Piece& piece) {
  const auto sum = std::make_shared<LaneValue>(piece.sum);
  return {encode_head(piece.head), std::as_bytes(std::span(sum->data)),
          encode_foot(piece.head, BulkFoot{0, 0, 0, sum->tail}), sum};
}

}  // namespace lockstep
