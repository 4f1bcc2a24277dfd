#pragma once

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

inline Bytes bytes_of(std::span<const float> values) {
  const auto bytes = std::as_bytes(values);
  return {bytes.begin(), bytes.end()};
}

// A message with data, all of it.
struct Gradient {
  BulkHead head;
  Bytes data;
  BulkFoot foot;

  bool operator==(const Gradient&) const = default;
};

// Head, data and foot in one buffer.
inline Bytes encode_whole(const Gradient& gradient) {
  LOCKSTEP_CHECK(gradient.data.size() == gradient.head.count * element_bytes(gradient.head.tag));
  Bytes frame = encode_head(gradient.head);
  frame.insert(frame.end(), gradient.data.begin(), gradient.data.end());
  const Bytes end = encode_foot(gradient.head, gradient.foot);
  frame.insert(frame.end(), end.begin(), end.end());
  return frame;
}

inline Bytes encode_gradient(const BulkHead& head, std::span<const float> data,
                             const BulkFoot& foot) {
  return encode_whole({head, bytes_of(data), foot});
}

// As a receiver does it that has the whole frame, whose length field says `length`.
inline std::optional<Gradient> decode_whole(std::span<const std::byte> body, std::uint32_t length) {
  HeadResult result = decode_head(body, length);
  if (result.state != HeadResult::State::kDone || body.size() != length) return std::nullopt;
  const std::size_t data_bytes = result.head.count * element_bytes(result.head.tag);
  const auto data = body.subspan(result.size, data_bytes);
  auto foot = decode_foot(result.head, body.subspan(result.size + data_bytes));
  if (!foot) return std::nullopt;
  return Gradient{result.head, {data.begin(), data.end()}, *foot};
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
  const Bytes data =
      bytes_of(std::vector<float>{1.0f, -0.0f, std::numeric_limits<float>::denorm_min()});
  const auto head = [](WireTag tag) {
    BulkHead made;
    made.tag = tag;
    made.step = 0x0102030405060708;
    made.count = 3;
    return made;
  };
  BulkHead vector = head(WireTag::kGradientPayload);
  vector.worker_id = 7;
  BulkHead block = head(WireTag::kBlockGradientPayload);
  block.worker_id = 7;
  block.block_idx = 3;
  block.num_blocks = 4;
  block.component_sizes = {1, 2};
  BulkHead averaged_block = head(WireTag::kAveragedBlockGradient);
  averaged_block.block_idx = 3;
  averaged_block.component_sizes = {3};
  BulkHead other = head(WireTag::kNonBlockGradientPayload);
  other.worker_id = 7;
  other.component = 2;
  BulkHead averaged_other = head(WireTag::kAveragedNonBlockGradient);
  averaged_other.component = 1;
  BulkHead partial = head(WireTag::kPartialSum);
  partial.offset = 1ull << 40;
  partial.lanes = 12;
  partial.lane_begin = 8;
  partial.lane_end = 12;
  partial.call = 0x1112131415161718;
  partial.tail_count = 2;
  BulkHead sum = head(WireTag::kRawSum);
  sum.offset = 9;
  sum.lanes = 12;
  sum.call = 0x1112131415161718;
  sum.tail_count = 1;
  BulkHead bytes;
  bytes.tag = WireTag::kBytes;
  bytes.to = kEveryOther;
  bytes.from = 7;
  bytes.stamp.sequence = 12;
  bytes.count = bytes.stamp.payload = 3;
  return {{vector, data, {0.5f, 8, 9, {}}},
          {head(WireTag::kAveragedGradient), data, {0.25f, 0, 0, {}}},
          {block, data, {}},
          {averaged_block, data, {}},
          {other, data, {}},
          {averaged_other, data, {}},
          {partial, data, {0, 0, 0, {1.5, -2.5}}},
          {sum, data, {0, 0, 0, {1e300}}},
          {bytes, {data.begin(), data.begin() + 3}, {}}};
}

inline Bytes bytes_of_hex(const std::string& hex) {
  Bytes bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

}  // namespace lockstep::test
