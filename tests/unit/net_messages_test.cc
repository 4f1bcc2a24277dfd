#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/wire/bytes.h"
#include "lockstep/wire/control_messages.h"
#include "lockstep/wire/join_messages.h"
#include "lockstep/wire/message.h"
#include "lockstep/wire/wire_error.h"
#include "tests/support/ranks.h"

namespace lockstep::net_messages_test {
namespace {

using ::testing::HasSubstr;
using namespace test;

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

Card make_card(int rank, int world_size) {
  Card card;
  card.rank = rank;
  card.world_size = world_size;
  card.version = "1.2.3";
  card.id = random_member_id();
  card.pid = 4711;
  card.host = {"node7", "boot", 42};
  card.mesh_address = "[::1]:5";
  card.unix_name = "name";
  card.fingerprint = "x86-64";
  card.cores = "0-3";
  return card;
}

RosterMessage make_roster(int centre, std::vector<Card> cards) {
  RosterMessage message;
  message.centre.rank = centre;
  message.centre.title = "the coordinator";
  message.centre.hostname = "node1";
  message.timeout = std::chrono::seconds(30);
  message.centre.pid = 17;
  message.roster = std::move(cards);
  return message;
}

// Every proper prefix, and every extension, of a valid body must be refused.
template <typename Decode>
void expect_exact(const std::vector<std::byte>& body, Decode decode) {
  ASSERT_TRUE(decode(body));
  for (std::size_t size = 0; size < body.size(); ++size) {
    EXPECT_FALSE(decode(std::span(body).first(size))) << size;
  }
  std::vector<std::byte> longer = body;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(decode(longer));
}

TEST(Message, ComesBackWholeHoweverTheStreamIsCut) {
  const auto first = frame(MessageKind::kPing, {});
  const auto second = frame(MessageKind::kReport, bytes_of("body"));
  std::vector<std::byte> stream = first;
  stream.insert(stream.end(), second.begin(), second.end());
  for (std::size_t cut = 0; cut <= stream.size(); ++cut) {
    MessageBuffer buffer;
    std::vector<Message> messages;
    for (const auto part : {std::span(stream).first(cut), std::span(stream).subspan(cut)}) {
      buffer.append(part);
      while (auto message = buffer.next(100, "peer")) messages.push_back(*message);
    }
    ASSERT_EQ(messages.size(), 2u);
    EXPECT_EQ(messages[0], (Message{MessageKind::kPing, {}}));
    EXPECT_EQ(messages[1], (Message{MessageKind::kReport, bytes_of("body")}));
    EXPECT_TRUE(buffer.rest().empty());
  }
}

TEST(Message, HeaderIsWhatThePageSays) {
  const auto bytes = frame(MessageKind::kVerdict, bytes_of("ab"));
  EXPECT_EQ(bytes, bytes_of(std::string_view("LSKP\x06\x00\x23\x00\x02\x00\x00\x00"
                                             "ab",
                                             14)));
}

TEST(Message, RefusesStrangersOtherVersionsAndHugeBodies) {
  const auto parse = [](std::vector<std::byte> bytes) {
    MessageBuffer buffer;
    buffer.append(bytes);
    return error_of([&] { buffer.next(1000, "node7:1"); });
  };
  const Error garbage = parse(bytes_of("GET / HTTP/1.1\r\n"));
  EXPECT_EQ(garbage.code(), ErrorCode::kUnexpectedMessage);
  EXPECT_THAT(garbage.what(), HasSubstr("node7:1"));

  auto bytes = frame(MessageKind::kHello, {});
  bytes[4] = std::byte{9};
  const Error version = parse(bytes);
  EXPECT_EQ(version.code(), ErrorCode::kVersionMismatch);
  EXPECT_THAT(version.what(), HasSubstr("version 9"));
  EXPECT_THAT(version.what(), HasSubstr(fmt::format("version {}", kProtocolVersion)));

  bytes = frame(MessageKind::kHello, {});
  store_little_endian<std::uint32_t>(bytes.data() + 8, 0xffffffff);
  EXPECT_EQ(parse(bytes).code(), ErrorCode::kMessageTooLarge);
}

TEST(JoinMessages, RoundTrip) {
  const Join join{make_card(1, 3), 12345ms};
  EXPECT_EQ(decode_join(encode(join)), join);
  expect_exact(encode(join), [](auto body) { return decode_join(body).has_value(); });

  const RosterMessage roster = make_roster(0, {make_card(0, 2), make_card(1, 2)});
  EXPECT_EQ(decode_roster(encode(roster)), roster);
  expect_exact(encode(roster), [](auto body) { return decode_roster(body).has_value(); });
}

TEST(JoinMessages, ARosterOutOfOrderIsRefused) {
  EXPECT_FALSE(decode_roster(encode(make_roster(0, {make_card(1, 2), make_card(0, 2)}))));
  EXPECT_FALSE(decode_roster(encode(make_roster(0, {make_card(0, 3), make_card(1, 3)}))));
  EXPECT_FALSE(decode_roster(encode(make_roster(2, {make_card(0, 1)}))));
  EXPECT_FALSE(decode_roster(encode(make_roster(-1, {}))));
  EXPECT_TRUE(decode_roster(encode(make_roster(-1, {make_card(0, 1)}))));
}

// As a peer that is not ours might write it: valid, but for one byte of one text.
std::vector<std::byte> with_foreign_byte(std::vector<std::byte> body, std::string_view text) {
  const auto wanted = std::as_bytes(std::span(text));
  const auto found = std::search(body.begin(), body.end(), wanted.begin(), wanted.end());
  EXPECT_NE(found, body.end()) << text;
  if (found != body.end()) *found = std::byte{0xff};
  return body;
}

TEST(JoinMessages, TextsThatAreNoUtf8AreRefused) {
  const auto join = encode(Join{make_card(1, 3), 12345ms});
  for (const char* text : {"1.2.3", "node7", "boot", "[::1]:5", "name", "x86-64", "0-3"}) {
    EXPECT_FALSE(decode_join(with_foreign_byte(join, text))) << text;
  }
  RosterMessage roster = make_roster(0, {make_card(0, 2), make_card(1, 2)});
  roster.departed = {{0, Departure::Kind::kDied, "who left", "why it left"}};
  const auto body = encode(roster);
  ASSERT_TRUE(decode_roster(body));
  for (const char* text : {"the coordinator", "node1", "node7", "who left", "why it left"}) {
    EXPECT_FALSE(decode_roster(with_foreign_byte(body, text))) << text;
  }
}

TEST(JoinMessages, WhatThisHostHasNoUtf8ForIsSentAllTheSame) {
  RosterMessage roster = make_roster(0, {make_card(0, 1)});
  roster.roster[0].host.hostname = "n\xff";
  // The limit falls into a character of two bytes.
  roster.departed = {
      {0, Departure::Kind::kDied, "rank 0", std::string(kMaxWhy - 1, 'x') + "\u00e9"}};
  const auto told = decode_roster(encode(roster));
  ASSERT_TRUE(told);
  EXPECT_EQ(told->roster[0].host.hostname, "n?");
  EXPECT_EQ(told->departed[0].why, std::string(kMaxWhy - 1, 'x'));
}

TEST(JoinMessages, ACountWithoutItsBytesIsRefused) {
  ByteWriter writer;
  writer.i32(0);
  writer.i32(1);
  writer.string("node1", kMaxCardText);
  writer.u32(kMaxWorldSize);
  EXPECT_FALSE(decode_roster(writer.written()));
}

TEST(ControlMessages, RoundTrip) {
  const std::vector<Progress> progress = {{0, 17, true, "all_reduce"}, {3, 1ull << 40, false, ""}};
  const Pulse pulse{77, progress};
  EXPECT_EQ(decode_pulse(encode(pulse)), pulse);
  expect_exact(encode(pulse), [](auto body) { return decode_pulse(body).has_value(); });

  const Report report{Error(ErrorCode::kTimeout, "late", 2), progress, 77};
  const auto decoded = decode_report(encode(report));
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->error.code(), ErrorCode::kTimeout);
  EXPECT_EQ(decoded->error.message(), "late");
  EXPECT_EQ(decoded->error.rank(), 2);
  EXPECT_EQ(decoded->progress, progress);
  EXPECT_EQ(decoded->generation, 77u);
  expect_exact(encode(report), [](auto body) { return decode_report(body).has_value(); });

  const GenerationEnd end{77, Error(ErrorCode::kPeerLost, "it died", 2)};
  const auto ended = decode_generation_end(encode(end));
  ASSERT_TRUE(ended);
  EXPECT_EQ(ended->generation, 77u);
  EXPECT_STREQ(ended->error.what(), end.error.what());
  EXPECT_EQ(ended->error.rank(), 2);
  expect_exact(encode(end), [](auto body) { return decode_generation_end(body).has_value(); });

  const Wish wish{15, 7, true};
  EXPECT_EQ(decode_wish(encode(wish)), wish);
  expect_exact(encode(wish), [](auto body) { return decode_wish(body).has_value(); });
  EXPECT_FALSE(decode_wish(encode(Wish{65, 0, false})));
  EXPECT_TRUE(decode_wish(encode(Wish{0, kMostSaveRequest, false})));
  EXPECT_FALSE(decode_wish(encode(Wish{0, kMostSaveRequest + 1, false})));
  EXPECT_EQ(decode_tag(encode_tag(9)), 9u);
  EXPECT_EQ(decode_redirect(encode_redirect("10.0.0.3:4711")), "10.0.0.3:4711");
}

TEST(ControlMessages, LongTextsAndManyGroupsAreCut) {
  const std::vector<Progress> progress(kMaxGroups + 5, {1, 1, true, std::string(5000, 'x')});
  const Report report{Error(ErrorCode::kIo, std::string(100000, 'y')), progress};
  const auto body = encode(report);
  EXPECT_LE(body.size(), kMaxControlBody);
  const auto decoded = decode_report(body);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->progress.size(), kMaxGroups);
  EXPECT_EQ(decoded->progress[0].description.size(), kMaxDescription);
  EXPECT_EQ(decoded->error.message().size(), kMaxErrorText);
}

TEST(ControlMessages, TextsThatAreNoUtf8AreRefused) {
  const Pulse pulse{77, {{0, 17, true, "all_reduce"}}};
  EXPECT_FALSE(decode_pulse(with_foreign_byte(encode(pulse), "all_reduce")));
  EXPECT_FALSE(decode_redirect(with_foreign_byte(encode_redirect("10.0.0.3:1"), "10.0.0.3:1")));
}

TEST(WireError, RefusesUnknownCodesAndRanks) {
  const Error error(ErrorCode::kMessageTooLarge, "text", 7);
  auto body = encode_wire_error(error);
  EXPECT_EQ(decode_wire_error(body), (WireError{ErrorCode::kMessageTooLarge, 7, "text"}));
  expect_exact(body, [](auto bytes) { return decode_wire_error(bytes).has_value(); });
  auto bad_code = body;
  bad_code[0] = std::byte{22};
  EXPECT_FALSE(decode_wire_error(bad_code));
  auto bad_rank = body;
  store_little_endian<std::int32_t>(bad_rank.data() + 1, -2);
  EXPECT_FALSE(decode_wire_error(bad_rank));
}

}  // namespace
}  // namespace lockstep::net_messages_test
