#pragma once

#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/check.h"
#include "lockstep/wire/gradient_messages.h"

namespace lockstep::test {

// Gradient messages of every kind, whole frames, for tests of their codec.

using Bytes = std::vector<std::byte>;

inline std::span<const std::byte> body_of(const Bytes& frame) {
  return std::span(frame).subspan(4);
}

inline std::span<const std::byte, kFrameStartBytes> start_of(const Bytes& frame) {
  return std::span(frame).first<kFrameStartBytes>();
}

// Head, data and foot in one buffer.
inline Bytes encode_gradient(const GradientHead& head, std::span<const float> data,
                             const GradientFoot& foot) {
  LOCKSTEP_CHECK(data.size() == head.count);
  Bytes frame = encode_head(head);
  const auto elements = std::as_bytes(data);
  frame.insert(frame.end(), elements.begin(), elements.end());
  const Bytes end = encode_foot(head, foot);
  frame.insert(frame.end(), end.begin(), end.end());
  return frame;
}

// A message with f32 data, all of it.
struct Gradient {
  GradientHead head;
  std::vector<float> data;
  GradientFoot foot;

  bool operator==(const Gradient&) const = default;
};

inline Bytes encode_whole(const Gradient& gradient) {
  return encode_gradient(gradient.head, gradient.data, gradient.foot);
}

// As a receiver does it that has the whole frame, whose length field says `length`.
inline std::optional<Gradient> decode_whole(std::span<const std::byte> body, std::uint32_t length) {
  HeadResult result = decode_head(body, length);
  if (result.state != HeadResult::State::kDone || body.size() != length) return std::nullopt;
  const std::size_t data_bytes = result.head.count * sizeof(float);
  Gradient gradient{result.head, std::vector<float>(result.head.count), {}};
  if (data_bytes > 0) std::memcpy(gradient.data.data(), &body[result.size], data_bytes);
  auto foot = decode_foot(result.head, body.subspan(result.size + data_bytes));
  if (!foot) return std::nullopt;
  gradient.foot = *foot;
  return gradient;
}
inline std::optional<Gradient> decode_whole(std::span<const std::byte> body) {
  return decode_whole(body, static_cast<std::uint32_t>(body.size()));
}

inline std::vector<SmallMessage> small_messages() {
  return {JoinRequest{"node-\xc3\xa9", 3, "cuda"},
          JoinAccepted{1, 2},
          ShardAssignment{std::numeric_limits<std::uint64_t>::max(), 5, 6},
          Heartbeat{"n", 17},
          Shutdown{},
          Alive{},
          Halt{{ErrorCode::kNonFinite, 2, "worker 2 sent NaN"}},
          Refusal{{ErrorCode::kAuthentication, -1, "the job is full"}},
          Totals{4, 0.5f, 9, 10},
          Welcome{30000, 1, 1, 1024, 1u << 30}};
}

inline std::vector<Gradient> gradients() {
  const std::vector<float> data = {1.0f, -0.0f, std::numeric_limits<float>::denorm_min()};
  const auto head = [](WireTag tag) {
    GradientHead made;
    made.tag = tag;
    made.step = 0x0102030405060708;
    made.count = 3;
    return made;
  };
  GradientHead vector = head(WireTag::kGradientPayload);
  vector.worker_id = 7;
  GradientHead block = head(WireTag::kBlockGradientPayload);
  block.worker_id = 7;
  block.block_idx = 3;
  block.num_blocks = 4;
  block.component_sizes = {1, 2};
  GradientHead averaged_block = head(WireTag::kAveragedBlockGradient);
  averaged_block.block_idx = 3;
  averaged_block.component_sizes = {3};
  GradientHead other = head(WireTag::kNonBlockGradientPayload);
  other.worker_id = 7;
  other.component = 2;
  GradientHead averaged_other = head(WireTag::kAveragedNonBlockGradient);
  averaged_other.component = 1;
  GradientHead partial = head(WireTag::kPartialSum);
  partial.offset = 1ull << 40;
  partial.lanes = 12;
  partial.lane_begin = 8;
  partial.lane_end = 12;
  partial.tail_count = 2;
  GradientHead sum = head(WireTag::kRawSum);
  sum.offset = 9;
  sum.lanes = 12;
  sum.tail_count = 1;
  return {{vector, data, {0.5f, 8, 9, {}}},
          {head(WireTag::kAveragedGradient), data, {0.25f, 0, 0, {}}},
          {block, data, {}},
          {averaged_block, data, {}},
          {other, data, {}},
          {averaged_other, data, {}},
          {partial, data, {0, 0, 0, {1.5, -2.5}}},
          {sum, data, {0, 0, 0, {1e300}}}};
}

inline Bytes bytes_of_hex(const std::string& hex) {
  Bytes bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

}  // namespace lockstep::test
