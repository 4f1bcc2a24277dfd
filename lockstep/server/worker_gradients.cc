// The gradients that a worker sends and receives.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/server/worker_client.h"

namespace lockstep {
namespace {

std::string describe(const GradientHead& head) {
  switch (head.tag) {
    case WireTag::kAveragedBlockGradient:
      return fmt::format("the average of block {} of step {}", head.block_idx, head.step);
    case WireTag::kAveragedNonBlockGradient:
      return fmt::format("the average of component {} of step {}", head.component, head.step);
    case WireTag::kRawSum:
      return fmt::format("the sum of step {} from element {} on", head.step, head.offset);
    default: return fmt::format("the {} of step {}", to_string(head.tag), head.step);
  }
}

}  // namespace

void WorkerClient::send(const GradientHead& head, std::span<const float> data,
                        const GradientFoot& foot) {
  const Lock lock(mutex_);
  if (failure_) throw Error(*failure_);
  const std::uint64_t bytes = data.size_bytes() + kMaxGradientHead + foot_bytes(head);
  if (settings_ && bytes > settings_->largest_frame) {
    throw Error(ErrorCode::kMessageTooLarge,
                fmt::format("a {} of {} elements; the coordinator takes frames of up to {} bytes",
                            to_string(head.tag), data.size(), settings_->largest_frame));
  }
  if (head.tag == WireTag::kGradientPayload && ours_) {
    channel_.queue(encode(Totals{head.step, foot.loss, foot.correct, foot.total}));
  }
  channel_.queue({encode_head(head), std::as_bytes(data), encode_foot(head, foot), {}});
  drive(fmt::format("{} to take the {} of step {}", channel_.socket().peer(), to_string(head.tag),
                    head.step),
        [this] { return !channel_.wants_to_send(); });
}

bool WorkerClient::open_expected(const GradientHead& expected) {
  const auto start = channel_.start();
  if (!start || is_control(start->tag)) return false;
  const auto refuse = [&](ErrorCode code, const std::string& what) {
    throw Error(code, fmt::format("{} sent {}; we wait for {}", channel_.socket().peer(), what,
                                  describe(expected)));
  };
  if (start->tag != expected.tag) {
    refuse(ErrorCode::kUnexpectedMessage, fmt::format("a {}", to_string(start->tag)));
  }
  if (!channel_.open_gradient()) return false;
  const GradientHead& head = channel_.head();
  if (head.step != expected.step) {
    refuse(ErrorCode::kStepMismatch, fmt::format("step {}", head.step));
  }
  if (head.block_idx != expected.block_idx) {
    refuse(ErrorCode::kBlockMismatch, fmt::format("block {}", head.block_idx));
  }
  if (head.component != expected.component) {
    refuse(ErrorCode::kComponentMismatch, fmt::format("component {}", head.component));
  }
  if (head.count != expected.count || head.offset != expected.offset ||
      head.tail_count != expected.tail_count) {
    refuse(ErrorCode::kSizeMismatch,
           fmt::format("{} elements from {} on and a tail of {} instead of {}, {} and {}",
                       head.count, head.offset, head.tail_count, expected.count, expected.offset,
                       expected.tail_count));
  }
  last_sizes_ = head.component_sizes;
  return true;
}

GradientFoot WorkerClient::receive(const GradientHead& expected, std::span<float> into) {
  const Lock lock(mutex_);
  std::size_t done = 0;  // bytes
  std::optional<GradientFoot> foot;
  drive(describe(expected), [&] {
    if (!channel_.gradient_is_open() && !open_expected(expected)) return false;
    while (channel_.elements_left() > 0) {
      if (channel_.read_elements(into, done) == 0 && channel_.elements_left() > 0) return false;
    }
    foot = channel_.take_foot();
    return foot.has_value();
  });
  return std::move(*foot);
}

void WorkerClient::send_gradient(std::uint64_t step, std::span<const float> gradients, float loss,
                                 std::uint64_t correct, std::uint64_t total) {
  GradientHead head;
  head.tag = WireTag::kGradientPayload;
  head.step = step;
  head.worker_id = static_cast<std::uint32_t>(worker_id_);
  head.count = gradients.size();
  send(head, gradients, {loss, correct, total, {}});
}

float WorkerClient::receive_averaged(std::uint64_t step, std::span<float> gradients) {
  GradientHead head;
  head.tag = WireTag::kAveragedGradient;
  head.step = step;
  head.count = gradients.size();
  return receive(head, gradients).loss;
}

void WorkerClient::send_block(std::uint64_t step, std::uint32_t block, std::uint32_t num_blocks,
                              std::span<const float> gradients,
                              std::span<const std::uint32_t> component_sizes) {
  GradientHead head;
  head.tag = WireTag::kBlockGradientPayload;
  head.step = step;
  head.worker_id = static_cast<std::uint32_t>(worker_id_);
  head.block_idx = block;
  head.num_blocks = num_blocks;
  head.component_sizes.assign(component_sizes.begin(), component_sizes.end());
  head.count = gradients.size();
  send(head, gradients, {});
}

std::vector<std::uint32_t> WorkerClient::receive_averaged_block(std::uint64_t step,
                                                                std::uint32_t block,
                                                                std::span<float> gradients) {
  GradientHead head;
  head.tag = WireTag::kAveragedBlockGradient;
  head.step = step;
  head.block_idx = block;
  head.count = gradients.size();
  receive(head, gradients);
  return std::exchange(last_sizes_, {});
}

void WorkerClient::send_component(std::uint64_t step, std::uint8_t component,
                                  std::span<const float> gradients) {
  GradientHead head;
  head.tag = WireTag::kNonBlockGradientPayload;
  head.step = step;
  head.worker_id = static_cast<std::uint32_t>(worker_id_);
  head.component = component;
  head.count = gradients.size();
  send(head, gradients, {});
}

void WorkerClient::receive_averaged_component(std::uint64_t step, std::uint8_t component,
                                              std::span<float> gradients) {
  GradientHead head;
  head.tag = WireTag::kAveragedNonBlockGradient;
  head.step = step;
  head.component = component;
  head.count = gradients.size();
  receive(head, gradients);
}

std::vector<double> WorkerClient::reduce_lanes(std::uint64_t step, std::uint64_t offset,
                                               std::uint32_t lanes, std::span<const LanePart> parts,
                                               std::size_t tail_count, std::span<float> sum) {
  LOCKSTEP_CHECK(ours_);
  const Lock lock(mutex_);
  if (failure_) throw Error(*failure_);
  GradientHead head;
  head.tag = WireTag::kPartialSum;
  head.step = step;
  head.lanes = lanes;
  const std::size_t pieces = std::max<std::size_t>(1, (sum.size() + kLanePiece - 1) / kLanePiece);
  // The fields of a piece that both directions share; the last one has the tail.
  const auto select = [&](std::size_t piece) {
    const std::size_t begin = piece * kLanePiece;
    head.offset = offset + begin;
    head.count = std::min(kLanePiece, sum.size() - begin);
    head.tail_count = piece + 1 == pieces ? static_cast<std::uint32_t>(tail_count) : 0;
    return begin;
  };
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    const std::size_t begin = select(piece);
    for (const LanePart& part : parts) {
      LOCKSTEP_CHECK(part.data.size() == sum.size() && part.tail.size() == tail_count);
      head.lane_begin = static_cast<std::uint32_t>(part.node.begin);
      head.lane_end = static_cast<std::uint32_t>(part.node.end);
      GradientFoot foot;
      if (head.tail_count > 0) foot.tail = part.tail;
      channel_.queue({encode_head(head),
                      std::as_bytes(part.data.subspan(begin, head.count)),
                      encode_foot(head, foot),
                      {}});
    }
  }
  head = {.tag = WireTag::kRawSum, .step = step, .component_sizes = {}, .lanes = lanes};
  std::size_t piece = 0;
  std::size_t begin = select(piece);
  std::size_t done = 0;  // bytes of the piece
  std::vector<double> tail;
  drive(describe(head), [&] {
    while (piece < pieces) {
      if (!channel_.gradient_is_open() && !open_expected(head)) return false;
      while (channel_.elements_left() > 0) {
        const auto into = sum.subspan(begin, head.count);
        if (channel_.read_elements(into, done) == 0 && channel_.elements_left() > 0) return false;
      }
      auto foot = channel_.take_foot();
      if (!foot) return false;
      tail = std::move(foot->tail);
      done = 0;
      if (++piece < pieces) begin = select(piece);
      take_control();
    }
    return !channel_.wants_to_send();
  });
  return tail;
}

}  // namespace lockstep
