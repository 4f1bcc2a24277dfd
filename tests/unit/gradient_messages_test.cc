#include "lockstep/wire/gradient_messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "lockstep/net/job/handshake.h"
#include "lockstep/wire/bytes.h"
#include "tests/support/gradient_frames.h"

namespace lockstep::gradient_messages_test {
namespace {

using namespace test;

// The vectors that the original implementation wrote.

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
  const auto elements = f["gradients"].get<std::vector<float>>();
  gradient.data = bytes_of(elements);
  gradient.head.tag = tag;
  gradient.head.step = f["step"];
  gradient.head.worker_id = f.value("worker_id", 0u);
  gradient.head.block_idx = f.value("block_idx", 0u);
  gradient.head.num_blocks = f.value("num_blocks", 0u);
  gradient.head.component = f.value("component", std::uint8_t{0});
  gradient.head.component_sizes = f.value("component_sizes", std::vector<std::uint32_t>{});
  gradient.head.count = elements.size();
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
    EXPECT_LT(start->tag, WireTag::kPartialSum);  // no extension
    if (is_bulk(start->tag)) {
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
  BulkHead partial;
  partial.tag = WireTag::kPartialSum;
  partial.step = 7;
  partial.offset = 100;
  partial.lanes = 8;
  partial.lane_begin = 4;
  partial.lane_end = 6;
  partial.call = 0x0123456789abcdef;
  partial.tail_count = 1;
  partial.count = 1;
  const Bytes one = bytes_of(std::vector<float>{1.0f});
  EXPECT_EQ(encode_whole({partial, one, {0, 0, 0, {2.0}}}), bytes_of_hex("0000003d40"
                                                                         "0700000000000000"
                                                                         "6400000000000000"
                                                                         "08000000"
                                                                         "04000000"
                                                                         "06000000"
                                                                         "efcdab8967452301"
                                                                         "01000000"
                                                                         "0100000000000000"
                                                                         "0000803f"
                                                                         "0000000000000040"));
  BulkHead sum;
  sum.tag = WireTag::kRawSum;
  sum.step = 7;
  sum.offset = 100;
  sum.lanes = 8;
  sum.call = 0x0123456789abcdef;
  sum.count = 1;
  EXPECT_EQ(encode_whole({sum, one, {}}), bytes_of_hex("0000002d41"
                                                       "0700000000000000"
                                                       "6400000000000000"
                                                       "08000000"
                                                       "efcdab8967452301"
                                                       "00000000"
                                                       "0100000000000000"
                                                       "0000803f"));
}

// The stamp is the header of docs/mesh_protocol.md, whose own test is mesh_frame_test.cc.
TEST(GradientMessages, BytesCarryTheStampOfTheirCall) {
  BulkHead head;
  head.tag = WireTag::kBytes;
  head.to = 2;
  head.from = 1;
  head.stamp.sequence = 9;
  head.stamp.part = 4;
  head.count = head.stamp.payload = 3;
  Bytes expected = bytes_of_hex(
      "0000004c47"
      "02000000"
      "01000000");
  for (const std::byte each : encode(head.stamp)) expected.push_back(each);
  for (const std::byte each : bytes_of_hex("aabbcc")) expected.push_back(each);
  EXPECT_EQ(encode_whole({head, bytes_of_hex("aabbcc"), {}}), expected);
  // A bit of the stamp, and a payload that is not the frame's.
  for (const std::size_t at : {std::size_t{4 + 9 + 16}, std::size_t{4 + 9 + 52}}) {
    Bytes wrong = expected;
    wrong[at] ^= std::byte{1};
    EXPECT_FALSE(decode_whole(body_of(wrong))) << at;
  }
  head.stamp.payload = 2;
  Bytes wrong = bytes_of_hex("0000004c470200000001000000");
  for (const std::byte each : encode(head.stamp)) wrong.push_back(each);
  for (const std::byte each : bytes_of_hex("aabbcc")) wrong.push_back(each);
  EXPECT_FALSE(decode_whole(body_of(wrong)));
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
    gradient.head.count = gradient.head.stamp.payload = 0;
    gradient.head.tail_count = 0;
    gradient.head.component_sizes.clear();
    gradient.data.clear();
    gradient.foot.tail.clear();
    EXPECT_EQ(decode_whole(body_of(encode_whole(gradient))), gradient)
        << to_string(gradient.head.tag);
  }
}

TEST(GradientMessages, FrameStart) {
  const auto start = [](const std::string& hex) {
    return decode_frame_start(start_of(bytes_of_hex(hex)));
  };
  EXPECT_EQ(start("0000000107"), (FrameStart{1, WireTag::kShutdown}));
  EXPECT_EQ(start("fffffffd04"), (FrameStart{0xfffffffd, WireTag::kGradientPayload}));
  EXPECT_FALSE(start("0000000007")) << "no room for the tag";
  for (const char* tag : {"00", "0c", "3f", "48", "ff"}) {
    EXPECT_FALSE(start(std::string("00000001") + tag)) << tag;
  }
}

TEST(GradientMessages, SmallAndGradientDecodersKeepToTheirOwn) {
  for (const SmallMessage& message : small_messages()) {
    const Bytes frame = encode(message);
    EXPECT_FALSE(is_bulk(tag_of(message)));
    EXPECT_EQ(decode_head(body_of(frame), static_cast<std::uint32_t>(frame.size() - 4)).state,
              HeadResult::State::kMalformed);
  }
  for (const Gradient& gradient : gradients()) {
    EXPECT_TRUE(is_bulk(gradient.head.tag));
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
  EXPECT_EQ(opening("000000"), Opening::kUndecided);
  EXPECT_EQ(opening("00000000"), Opening::kStranger) << "no room for the tag";
  EXPECT_EQ(opening("0000000107"), Opening::kStranger) << "a Shutdown";
  EXPECT_EQ(opening("0000001704"), Opening::kStranger) << "a GradientPayload";
  EXPECT_EQ(opening("0000400001"), Opening::kJoinRequest);
  EXPECT_EQ(opening("0000400101"), Opening::kStranger) << "longer than a small frame";
}

}  // namespace
}  // namespace lockstep::gradient_messages_test