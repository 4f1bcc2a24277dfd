#include "lockstep/wire/gradient_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "lockstep/net/handshake.h"
#include "lockstep/wire/bytes.h"
#include "tests/support/ranks.h"

namespace lockstep {
namespace {

using namespace testing;
using State = HeadResult::State;
using Bytes = std::vector<std::byte>;

std::span<const std::byte> body_of(const Bytes& frame) { return std::span(frame).subspan(4); }

std::span<const std::byte, kFrameStartBytes> start_of(const Bytes& frame) {
  return std::span(frame).first<kFrameStartBytes>();
}

// A message with f32 data, all of it.
struct Gradient {
  GradientHead head;
  std::vector<float> data;
  GradientFoot foot;

  bool operator==(const Gradient&) const = default;
};

Bytes encode_whole(const Gradient& gradient) {
  return encode_gradient(gradient.head, gradient.data, gradient.foot);
}

// As a receiver does it that has the whole frame, whose length field says `length`.
std::optional<Gradient> decode_whole(std::span<const std::byte> body, std::uint32_t length) {
  HeadResult result = decode_head(body, length);
  if (result.state != State::kDone || body.size() != length) return std::nullopt;
  const std::size_t data_bytes = result.head.count * sizeof(float);
  Gradient gradient{result.head, std::vector<float>(result.head.count), {}};
  if (data_bytes > 0) std::memcpy(gradient.data.data(), &body[result.size], data_bytes);
  auto foot = decode_foot(result.head, body.subspan(result.size + data_bytes));
  if (!foot) return std::nullopt;
  gradient.foot = *foot;
  return gradient;
}
std::optional<Gradient> decode_whole(std::span<const std::byte> body) {
  return decode_whole(body, static_cast<std::uint32_t>(body.size()));
}

std::vector<SmallMessage> small_messages() {
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

std::vector<Gradient> gradients() {
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

// The vectors that the original implementation wrote.

Bytes bytes_of_hex(const std::string& hex) {
  Bytes bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<std::byte>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

SmallMessage small_of(const std::string& name, const nlohmann::json& f) {
  if (name == "JoinRequest") return JoinRequest{f["node_id"], f["gpu_count"], f["backend"]};
  if (name == "JoinAccepted") return JoinAccepted{f["worker_id"], f["total_workers"]};
  if (name == "ShardAssignment") {
    return ShardAssignment{f["step"], f["shard_start"], f["shard_end"]};
  }
  if (name == "Heartbeat") return Heartbeat{f["node_id"], f["timestamp_ms"]};
  EXPECT_EQ(name, "Shutdown");
  return Shutdown{};
}

Gradient gradient_of(WireTag tag, const nlohmann::json& f) {
  Gradient gradient;
  gradient.data = f["gradients"].get<std::vector<float>>();
  gradient.head.tag = tag;
  gradient.head.step = f["step"];
  gradient.head.worker_id = f.value("worker_id", 0u);
  gradient.head.block_idx = f.value("block_idx", 0u);
  gradient.head.num_blocks = f.value("num_blocks", 0u);
  gradient.head.component = f.value("component", std::uint8_t{0});
  gradient.head.component_sizes = f.value("component_sizes", std::vector<std::uint32_t>{});
  gradient.head.count = gradient.data.size();
  gradient.foot.loss = f.value("loss", f.value("global_loss", 0.0f));
  gradient.foot.correct = f.value("correct", 0u);
  gradient.foot.total = f.value("total", 0u);
  return gradient;
}

TEST(GradientMessages, AreByteForByteTheOriginals) {
  std::ifstream file(LOCKSTEP_VECTORS "/gradient_wire_vectors.json");
  const auto vectors = nlohmann::json::parse(file);
  ASSERT_EQ(vectors.size(), 11u);
  for (const auto& vector : vectors) {
    const std::string name = vector["message"];
    SCOPED_TRACE(name);
    const Bytes frame = bytes_of_hex(vector["frame_hex"]);
    const auto start = decode_frame_start(start_of(frame));
    ASSERT_TRUE(start);
    EXPECT_EQ(start->length, frame.size() - 4);
    EXPECT_EQ(to_string(start->tag), name);
    EXPECT_FALSE(is_extension(start->tag));
    if (is_gradient(start->tag)) {
      const Gradient gradient = gradient_of(start->tag, vector["fields"]);
      EXPECT_EQ(encode_whole(gradient), frame);
      EXPECT_EQ(decode_whole(body_of(frame)), gradient);
    } else {
      const SmallMessage message = small_of(name, vector["fields"]);
      EXPECT_EQ(encode(message), frame);
      EXPECT_EQ(decode_small(body_of(frame)), message);
      EXPECT_EQ(tag_of(message), start->tag);
    }
  }
}

TEST(GradientMessages, ExtensionsLieAsThePageSays) {
  EXPECT_EQ(encode(Alive{}), bytes_of_hex("0000000142"));
  EXPECT_EQ(encode(Halt{{ErrorCode::kNonFinite, 2, "NaN"}}), bytes_of_hex("0000000d43"
                                                                          "0c"
                                                                          "02000000"
                                                                          "03000000"
                                                                          "4e614e"));
  EXPECT_EQ(encode(Refusal{{ErrorCode::kAborted, -1, ""}}), bytes_of_hex("0000000a44"
                                                                         "0a"
                                                                         "ffffffff"
                                                                         "00000000"));
  EXPECT_EQ(encode(Totals{7, 0.75f, 9, 10}), bytes_of_hex("0000001d45"
                                                          "0700000000000000"
                                                          "0000403f"
                                                          "0900000000000000"
                                                          "0a00000000000000"));
  EXPECT_EQ(encode(Welcome{1000, 1, 0, 1024, 0x7fffffff}), bytes_of_hex("0000001746"
                                                                        "e803000000000000"
                                                                        "01"
                                                                        "00"
                                                                        "0004000000000000"
                                                                        "ffffff7f"));
  GradientHead partial;
  partial.tag = WireTag::kPartialSum;
  partial.step = 7;
  partial.offset = 100;
  partial.lanes = 8;
  partial.lane_begin = 4;
  partial.lane_end = 6;
  partial.tail_count = 1;
  partial.count = 1;
  EXPECT_EQ(encode_whole({partial, {1.0f}, {0, 0, 0, {2.0}}}), bytes_of_hex("0000003540"
                                                                            "0700000000000000"
                                                                            "6400000000000000"
                                                                            "08000000"
                                                                            "04000000"
                                                                            "06000000"
                                                                            "01000000"
                                                                            "0100000000000000"
                                                                            "0000803f"
                                                                            "0000000000000040"));
  GradientHead sum;
  sum.tag = WireTag::kRawSum;
  sum.step = 7;
  sum.offset = 100;
  sum.lanes = 8;
  sum.count = 1;
  EXPECT_EQ(encode_whole({sum, {1.0f}, {}}), bytes_of_hex("0000002541"
                                                          "0700000000000000"
                                                          "6400000000000000"
                                                          "08000000"
                                                          "00000000"
                                                          "0100000000000000"
                                                          "0000803f"));
}

TEST(GradientMessages, WhatIsWrittenIsRead) {
  for (const SmallMessage& message : small_messages()) {
    EXPECT_EQ(decode_small(body_of(encode(message))), message) << to_string(tag_of(message));
  }
  for (const Gradient& gradient : gradients()) {
    EXPECT_EQ(decode_whole(body_of(encode_whole(gradient))), gradient)
        << to_string(gradient.head.tag);
  }
}

TEST(GradientMessages, EmptyGradientsAndSizesTravel) {
  for (Gradient gradient : gradients()) {
    gradient.head.count = 0;
    gradient.head.tail_count = 0;
    gradient.head.component_sizes.clear();
    gradient.data.clear();
    gradient.foot.tail.clear();
    EXPECT_EQ(decode_whole(body_of(encode_whole(gradient))), gradient)
        << to_string(gradient.head.tag);
  }
}

// Truncated, and its length field says so: a frame that is well framed and still no message.
TEST(GradientMessages, EveryTruncationAndEveryByteTooManyIsRefused) {
  for (const SmallMessage& message : small_messages()) {
    SCOPED_TRACE(to_string(tag_of(message)));
    const Bytes frame = encode(message);
    Bytes body(frame.begin() + 4, frame.end());
    for (std::size_t size = 0; size < body.size(); ++size) {
      EXPECT_FALSE(decode_small(std::span(body).first(size))) << size;
    }
    body.push_back(std::byte{0});
    EXPECT_FALSE(decode_small(body));
  }
  for (const Gradient& gradient : gradients()) {
    SCOPED_TRACE(to_string(gradient.head.tag));
    const Bytes frame = encode_whole(gradient);
    Bytes body(frame.begin() + 4, frame.end());
    for (std::size_t size = 0; size < body.size(); ++size) {
      const auto part = std::span(body).first(size);
      EXPECT_FALSE(decode_whole(part)) << size;
      EXPECT_EQ(decode_head(part, static_cast<std::uint32_t>(size)).state, State::kMalformed);
    }
    body.push_back(std::byte{0});
    EXPECT_FALSE(decode_whole(body));
    EXPECT_EQ(decode_head(body, static_cast<std::uint32_t>(body.size())).state, State::kMalformed);
  }
}

TEST(GradientMessages, AHeadMayArriveByteByByte) {
  for (const Gradient& gradient : gradients()) {
    SCOPED_TRACE(to_string(gradient.head.tag));
    const Bytes frame = encode_whole(gradient);
    const auto body = body_of(frame);
    const std::size_t head_size = encode_head(gradient.head).size() - 4;
    const auto length = static_cast<std::uint32_t>(body.size());
    for (std::size_t there = 0; there <= body.size(); ++there) {
      const HeadResult result = decode_head(body.first(there), length);
      if (there < head_size) {
        EXPECT_EQ(result.state, State::kIncomplete) << there;
      } else {
        ASSERT_EQ(result.state, State::kDone) << there;
        EXPECT_EQ(result.size, head_size);
        EXPECT_EQ(result.head, gradient.head);
      }
    }
  }
}

TEST(GradientMessages, ACountThatIsNotTheFramesIsRefused) {
  for (const Gradient& gradient : gradients()) {
    SCOPED_TRACE(to_string(gradient.head.tag));
    const Bytes frame = encode_whole(gradient);
    const std::size_t count_at = encode_head(gradient.head).size() - 8;
    // Times 4, two of these are 12 in 64 bits: as many bytes as there are.
    constexpr std::uint64_t kOne = 1;
    for (const std::uint64_t count : {kOne - 1, kOne + 1, kOne + 3, (kOne << 62) + 3,
                                      (kOne << 63) + 3, (kOne << 32) + 3, ~kOne, ~kOne + 1}) {
      Bytes wrong = frame;
      store_little_endian(&wrong[count_at], count);
      EXPECT_FALSE(decode_whole(body_of(wrong))) << count;
    }
  }
}

TEST(GradientMessages, AFrameTooShortForItsFootHasNoElements) {
  GradientHead head;
  head.tag = WireTag::kGradientPayload;
  Bytes frame = encode_head(head);
  // What is left for elements is less than nothing: 20 bytes, counted in 64 bits.
  store_little_endian(&frame[frame.size() - 8], (~std::uint64_t{0} - 19) / 4);
  EXPECT_EQ(decode_head(body_of(frame), 21).state, State::kMalformed);
}

TEST(GradientMessages, HugeCountsAreRefusedBeforeTheirBytesAre) {
  GradientHead head;
  head.tag = WireTag::kBlockGradientPayload;
  Bytes frame = encode_whole({head, {}, {}});
  const std::size_t sizes_at = 4 + 1 + 8 + 3 * 4;
  for (const std::uint32_t count : {kMaxComponents + 1, 1u << 30, 0xffffffffu}) {
    store_little_endian(&frame[sizes_at], count);
    // The frame claims to be large enough; no more bytes are waited for.
    EXPECT_EQ(decode_head(body_of(frame), UINT32_MAX).state, State::kMalformed) << count;
  }
  // One that is allowed waits for its bytes, and not for longer than a head can be.
  store_little_endian(&frame[sizes_at], kMaxComponents);
  EXPECT_EQ(decode_head(body_of(frame), UINT32_MAX).state, State::kIncomplete);

  GradientHead sum;
  sum.tag = WireTag::kRawSum;
  Bytes sum_frame = encode_whole({sum, {}, {}});
  const std::size_t tail_at = 4 + 1 + 8 + 8 + 4;
  for (const std::uint32_t count : {1u, kMaxTail + 1, 0xffffffffu}) {
    store_little_endian(&sum_frame[tail_at], count);
    EXPECT_FALSE(decode_whole(body_of(sum_frame))) << count;
    EXPECT_NE(decode_head(body_of(sum_frame), UINT32_MAX).state, State::kDone) << count;
  }

  for (const std::uint32_t length : {5u, kMaxWireText + 1, 0xffffffffu}) {
    Bytes join = encode(JoinRequest{"node", 1, "cpu"});
    store_little_endian(&join[5], length);
    EXPECT_FALSE(decode_small(body_of(join))) << length;
  }
}

TEST(GradientMessages, TheLargestHeadFitsItsLimit) {
  GradientHead head;
  head.tag = WireTag::kBlockGradientPayload;
  head.component_sizes.assign(kMaxComponents, 1);
  const Bytes frame = encode_head(head);
  EXPECT_LE(frame.size() - 4, kMaxGradientHead);
  EXPECT_EQ(decode_head(body_of(frame), static_cast<std::uint32_t>(frame.size() - 4)).head, head);
  head.component_sizes.push_back(1);
  EXPECT_EQ(error_of([&] { encode_head(head); }).code(), ErrorCode::kMessageTooLarge);
  // The largest small ones.
  const std::string text(kMaxWireText, 'x');
  EXPECT_LE(encode(JoinRequest{text, 1, text}).size(), kMaxSmallFrame);
  EXPECT_LE(encode(Halt{{ErrorCode::kIo, 1, text}}).size(), kMaxSmallFrame);
}

TEST(GradientMessages, WhatNoFrameCanHoldIsNotSent) {
  GradientHead head;
  head.tag = WireTag::kGradientPayload;
  head.count = (std::uint64_t{UINT32_MAX} - 41) / 4;  // 21 bytes ahead, 20 behind
  EXPECT_NO_THROW(encode_head(head));
  for (const std::uint64_t count : {head.count + 1, std::uint64_t{1} << 62, ~std::uint64_t{0}}) {
    head.count = count;
    EXPECT_EQ(error_of([&] { encode_head(head); }).code(), ErrorCode::kMessageTooLarge) << count;
  }
  EXPECT_EQ(error_of([] {
              encode(JoinRequest{std::string(kMaxWireText + 1, 'x'), 1, ""});
            }).code(),
            ErrorCode::kMessageTooLarge);
  EXPECT_EQ(error_of([] {
              encode(JoinRequest{"\xff", 1, ""});
            }).code(),
            ErrorCode::kInvalidArgument);
  head.tag = WireTag::kRawSum;
  head.count = 0;
  head.tail_count = kMaxTail + 1;
  EXPECT_EQ(error_of([&] { encode_head(head); }).code(), ErrorCode::kMessageTooLarge);
}

TEST(GradientMessages, AGibibyteHasAHead) {
  GradientHead head;
  head.tag = WireTag::kNonBlockGradientPayload;
  head.count = 1ull << 28;
  const Bytes frame = encode_head(head);
  const auto start = decode_frame_start(start_of(frame));
  ASSERT_TRUE(start);
  EXPECT_EQ(start->length, (1u << 30) + 22);
  EXPECT_EQ(decode_head(body_of(frame), start->length).head, head);
}

TEST(GradientMessages, TextsAreUtf8) {
  Bytes frame = encode(JoinRequest{"abc", 1, "cpu"});
  frame[9] = std::byte{0xff};
  EXPECT_FALSE(decode_small(body_of(frame)));
  frame = encode(Halt{{ErrorCode::kIo, 1, "abc"}});
  frame.back() = std::byte{0xc3};
  EXPECT_FALSE(decode_small(body_of(frame)));
  // What goes wrong is told in any case: cut between characters, foreign bytes replaced.
  std::string reason(kMaxErrorText - 1, 'x');
  reason += "\xc3\xa9";
  const auto halt = decode_small(body_of(encode(Halt{{ErrorCode::kIo, 1, reason}})));
  ASSERT_TRUE(halt);
  EXPECT_EQ(std::get<Halt>(*halt).error.message, std::string(kMaxErrorText - 1, 'x'));
  EXPECT_EQ(decode_small(body_of(encode(Refusal{{ErrorCode::kIo, 1, "a\xffz"}}))),
            SmallMessage(Refusal{{ErrorCode::kIo, 1, "a?z"}}));
}

TEST(GradientMessages, ANodeLiesInsideItsTree) {
  const auto accepted = [](std::uint32_t lanes, std::uint32_t begin, std::uint32_t end) {
    GradientHead head;
    head.tag = WireTag::kPartialSum;
    head.lanes = lanes;
    head.lane_begin = begin;
    head.lane_end = end;
    return decode_whole(body_of(encode_whole({head, {}, {}}))).has_value();
  };
  EXPECT_TRUE(accepted(8, 0, 8));
  EXPECT_TRUE(accepted(1, 0, 1));
  EXPECT_FALSE(accepted(8, 4, 9));
  EXPECT_FALSE(accepted(8, 4, 4));
  EXPECT_FALSE(accepted(8, 5, 4));
  EXPECT_FALSE(accepted(0, 0, 0));
}

TEST(GradientMessages, FrameStart) {
  const auto start = [](const std::string& hex) {
    return decode_frame_start(start_of(bytes_of_hex(hex)));
  };
  EXPECT_EQ(start("0000000107"), (FrameStart{1, WireTag::kShutdown}));
  EXPECT_EQ(start("fffffffd04"), (FrameStart{0xfffffffd, WireTag::kGradientPayload}));
  EXPECT_FALSE(start("0000000007")) << "no room for the tag";
  for (const char* tag : {"00", "0c", "3f", "47", "ff"}) {
    EXPECT_FALSE(start(std::string("00000001") + tag)) << tag;
  }
}

TEST(GradientMessages, SmallAndGradientDecodersKeepToTheirOwn) {
  for (const SmallMessage& message : small_messages()) {
    const Bytes frame = encode(message);
    EXPECT_FALSE(is_gradient(tag_of(message)));
    EXPECT_EQ(decode_head(body_of(frame), static_cast<std::uint32_t>(frame.size() - 4)).state,
              State::kMalformed);
  }
  for (const Gradient& gradient : gradients()) {
    EXPECT_TRUE(is_gradient(gradient.head.tag));
    EXPECT_FALSE(decode_small(body_of(encode_whole(gradient))));
  }
}

TEST(Opening, TellsOurOwnFromTheSeedsWorkers) {
  const Identity identity{"job", 0, random_member_id(), -1, "token"};
  const Bytes hello = Handshake(Handshake::Role::kClient, identity, Purpose::kServer).opening();
  const Bytes join = encode(JoinRequest{"node-a", 2, "cuda"});
  for (std::size_t there = 0; there < 10; ++there) {
    EXPECT_EQ(recognise_opening(std::span(hello).first(there)),
              there < 4 ? Opening::kUndecided : Opening::kHandshake);
    EXPECT_EQ(recognise_opening(std::span(join).first(there)),
              there < 5 ? Opening::kUndecided : Opening::kJoinRequest);
  }
}

TEST(Opening, StrangersAreKnownByTheirFirstWrongByte) {
  const auto opening = [](const std::string& hex) { return recognise_opening(bytes_of_hex(hex)); };
  EXPECT_EQ(opening("47"), Opening::kStranger) << "GET /";
  EXPECT_EQ(opening("ff"), Opening::kStranger);
  EXPECT_EQ(opening("4c53"), Opening::kUndecided);
  EXPECT_EQ(opening("4c5350"), Opening::kStranger) << "LSP, not LSKP";
  EXPECT_EQ(opening("0001"), Opening::kStranger) << "a join of 64 KiB and more";
  EXPECT_EQ(opening("00000000"), Opening::kUndecided);
  EXPECT_EQ(opening("0000000001"), Opening::kStranger) << "no room for the tag";
  EXPECT_EQ(opening("0000000107"), Opening::kStranger) << "a Shutdown";
  EXPECT_EQ(opening("0000001704"), Opening::kStranger) << "a GradientPayload";
  EXPECT_EQ(opening("0000400001"), Opening::kJoinRequest);
  EXPECT_EQ(opening("0000400101"), Opening::kStranger) << "longer than a small frame";
}

}  // namespace
}  // namespace lockstep
