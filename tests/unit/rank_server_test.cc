#include "lockstep/server/rank_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "lockstep/base/index.h"
#include "lockstep/server/server_run.h"
#include "lockstep/server/settings.h"
#include "tests/support/gradient_frames.h"
#include "tests/support/star.h"

namespace lockstep::rank_server_test {
namespace {

using namespace test;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// A server for two ranks that have joined and whose every byte is up to the test.
struct RanksByHand {
  explicit RanksByHand(Deadline::Clock::duration timeout = 20s)
      : server(listen_tcp(SocketAddress::loopback_v4()), options(timeout)) {
    expect_no_errors(run_ranks(2, [&](int rank) {
      JobOptions place;
      place.rank = rank;
      place.world_size = 2;
      place.master_port = server.address().port();
      place.hosted = true;
      place.listens = false;
      place.timeout = timeout;
      jobs[index_of(rank)] = join_job(place);
    }));
  }
  static HostOptions options(Deadline::Clock::duration timeout) {
    HostOptions options;
    options.world_size = 2;
    options.timeout = timeout;
    return options;
  }
  void connect(int rank) {
    Socket& socket = data[index_of(rank)];
    socket = connect_tcp(server.address(), soon());
    client_handshake(socket, jobs[index_of(rank)].identity, Purpose::kServer, 0, soon());
  }
  void send(int rank, const Bytes& bytes) { data[index_of(rank)].send_all(bytes, soon()); }
  // What both ranks and the server hear.
  Error verdict() {
    const auto cause = server.finish(soon());
    if (!cause) throw std::runtime_error("the server ended well");
    for (const JoinedJob& job : jobs) {
      const Deadline deadline = soon();
      while (!job.control->latch().tripped() && !deadline.expired()) std::this_thread::yield();
      expect_same(job.control->latch().error(), *cause);
    }
    return *cause;
  }

  ServerRun server;
  std::array<JoinedJob, 2> jobs;
  std::array<Socket, 2> data;
};

BulkHead bytes_head(std::uint32_t from, std::uint32_t to, std::size_t count) {
  BulkHead head;
  head.tag = WireTag::kBytes;
  head.from = from;
  head.to = to;
  head.count = head.stamp.payload = count;
  return head;
}

TEST(RankServer, BytesArePassedOnAsTheyAre) {
  RanksByHand ranks;
  for (const int rank : {0, 1}) ranks.connect(rank);
  for (const std::size_t count : {std::size_t{0}, std::size_t{3}, kBytesPiece}) {
    const Bytes sent = encode_whole({bytes_head(0, 1, count), Bytes(count, std::byte{7}), {}});
    ranks.send(0, sent);
    Bytes got(sent.size());
    ranks.data[1].recv_all(got, soon());
    EXPECT_EQ(got, sent);
  }
  for (auto& socket : ranks.data) socket = Socket();
  for (auto& job : ranks.jobs) job.control.reset();
  EXPECT_FALSE(ranks.server.finish(soon()));
}

TEST(RankServer, BytesOfAnotherForNobodyOrTooManyEndTheJob) {
  struct Case {
    BulkHead head;
    ErrorCode code;
    const char* words;
  };
  for (const Case& each :
       {Case{bytes_head(1, kEveryOther, 3), ErrorCode::kInvalidRank, "in the name of rank 1"},
        Case{bytes_head(0, 2, 3), ErrorCode::kInvalidRank, "sent Bytes for rank 2 of 2 ranks"},
        Case{bytes_head(0, 0, 3), ErrorCode::kInvalidRank, "sent Bytes for rank 0 of 2 ranks"},
        Case{bytes_head(0, 1, kBytesPiece + 1), ErrorCode::kMessageTooLarge,
             "262144 are allowed"}}) {
    RanksByHand ranks;
    for (const int rank : {0, 1}) ranks.connect(rank);
    ranks.send(0, encode_whole({each.head, Bytes(each.head.count), {}}));
    const Error error = ranks.verdict();
    EXPECT_EQ(error.code(), each.code) << error.what();
    EXPECT_EQ(error.rank(), 0);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("rank 0 ("), HasSubstr(each.words)));
  }
}

TEST(RankServer, WhatDoesNotBelongHereEndsTheJob) {
  RanksByHand ranks;
  for (const int rank : {0, 1}) ranks.connect(rank);
  ranks.send(1, encode(Shutdown{}));
  const Error error = ranks.verdict();
  EXPECT_EQ(error.code(), ErrorCode::kUnexpectedMessage);
  EXPECT_EQ(error.rank(), 1);
  EXPECT_THAT(error.what(), ContainsRegex("rank 1 .* sent a Shutdown; sums and bytes"));
}

TEST(RankServer, ARankThatJoinsAndNeverConnectsIsNamed) {
  RanksByHand ranks(500ms);
  ranks.connect(0);
  const Error error = ranks.verdict();
  EXPECT_EQ(error.code(), ErrorCode::kTimeout);
  EXPECT_EQ(error.rank(), 1);
  EXPECT_THAT(error.what(), HasSubstr("has not connected to the gradient server within"));
}

TEST(RankServer, ItEndsWhenAllHaveLeftWithoutAWord) {
  RanksByHand ranks;
  for (auto& job : ranks.jobs) job.control.reset();
  EXPECT_FALSE(ranks.server.finish(soon()));
}

// Who is no rank of the job gets no connection for data, whatever rank it claims.
TEST(RankServer, OnlyMembersOfTheJobAreServed) {
  RanksByHand ranks;
  Socket stranger = connect_tcp(ranks.server.address(), soon());
  client_handshake(stranger, {"lockstep", 0, random_member_id(), 0, ""}, Purpose::kServer, 0,
                   soon());
  std::array<std::byte, 4> length;
  stranger.recv_all(length, soon());
  Bytes body(ByteReader(length).u32_big_endian());
  stranger.recv_all(body, soon());
  const auto answer = decode_small(body);
  ASSERT_TRUE(answer && std::holds_alternative<Refusal>(*answer));
  EXPECT_THAT(std::get<Refusal>(*answer).error.message, HasSubstr("no rank of the job"));
  for (auto& job : ranks.jobs) job.control.reset();
  EXPECT_FALSE(ranks.server.finish(soon()));
}

}  // namespace
}  // namespace lockstep::rank_server_test
