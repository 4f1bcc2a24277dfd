#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/wire/bytes.h"
#include "lockstep/wire/gradient_messages.h"
#include "tests/support/gradient_frames.h"
#include "tests/support/ranks.h"

namespace lockstep::gradient_message_limits_test {
namespace {

using namespace test;
using State = HeadResult::State;

// Truncated, and its length field says so: a frame that is well framed and still no message.
TEST(GradientMessageLimits, EveryTruncationAndEveryByteTooManyIsRefused) {
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

TEST(GradientMessageLimits, AHeadMayArriveByteByByte) {
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

TEST(GradientMessageLimits, ACountThatIsNotTheFramesIsRefused) {
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

TEST(GradientMessageLimits, AFrameTooShortForItsFootHasNoElements) {
  BulkHead head;
  head.tag = WireTag::kGradientPayload;
  Bytes frame = encode_head(head);
  // What is left for elements is less than nothing: 20 bytes, counted in 64 bits.
  store_little_endian(&frame[frame.size() - 8], (~std::uint64_t{0} - 19) / 4);
  EXPECT_EQ(decode_head(body_of(frame), 21).state, State::kMalformed);
}

TEST(GradientMessageLimits, HugeCountsAreRefusedBeforeTheirBytesAre) {
  BulkHead head;
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

  BulkHead sum;
  sum.tag = WireTag::kRawSum;
  Bytes sum_frame = encode_whole({sum, {}, {}});
  const std::size_t tail_at = 4 + 1 + 8 + 8 + 4 + 8;
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

TEST(GradientMessageLimits, TheLargestHeadFitsItsLimit) {
  BulkHead head;
  head.tag = WireTag::kBlockGradientPayload;
  head.component_sizes.assign(kMaxComponents, 1);
  const Bytes frame = encode_head(head);
  EXPECT_LE(frame.size() - 4, kMaxBulkHead);
  EXPECT_EQ(decode_head(body_of(frame), static_cast<std::uint32_t>(frame.size() - 4)).head, head);
  head.component_sizes.push_back(1);
  EXPECT_EQ(error_of([&] { encode_head(head); }).code(), ErrorCode::kMessageTooLarge);
  // The largest small ones.
  const std::string text(kMaxWireText, 'x');
  EXPECT_LE(encode(JoinRequest{text, 1, text}).size(), kMaxSmallFrame);
  EXPECT_LE(encode(Halt{{ErrorCode::kIo, 1, text}}).size(), kMaxSmallFrame);
}

TEST(GradientMessageLimits, WhatNoFrameCanHoldIsNotSent) {
  BulkHead head;
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

TEST(GradientMessageLimits, AGibibyteHasAHead) {
  BulkHead head;
  head.tag = WireTag::kNonBlockGradientPayload;
  head.count = 1ull << 28;
  const Bytes frame = encode_head(head);
  const auto start = decode_frame_start(start_of(frame));
  ASSERT_TRUE(start);
  EXPECT_EQ(start->length, (1u << 30) + 22);
  EXPECT_EQ(decode_head(body_of(frame), start->length).head, head);
}

TEST(GradientMessageLimits, TextsAreUtf8) {
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

TEST(GradientMessageLimits, ANodeLiesInsideItsTree) {
  const auto accepted = [](std::uint32_t lanes, std::uint32_t begin, std::uint32_t end) {
    BulkHead head;
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

}  // namespace
}  // namespace lockstep::gradient_message_limits_test
