#include "lockstep/server/rank_client.h"

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "lockstep/comm/call_check.h"
#include "tests/support/gradient_frames.h"
#include "tests/support/star.h"

namespace lockstep::rank_client_test {
namespace {

using namespace test;

// A rank of two whose server and other rank are the test.
struct RankByHand {
  RankByHand() {
    const Socket listener = listen_tcp(SocketAddress::loopback_v4());
    JoinedJob job;
    job.identity = {"lockstep", 0, random_member_id(), 0, ""};
    job.roster.resize(2);
    job.roster[1].rank = 1;
    job.timeout = 20s;
    job.control = std::make_unique<ControlPlane>();
    std::thread accepting([&] {
      const Deadline deadline = soon();
      while (!server && !deadline.expired()) {
        if (auto socket = try_accept(listener)) server = std::move(*socket);
      }
      server_handshake(server, {"lockstep", 0, random_member_id(), -1, ""}, Purpose::kServer,
                       soon());
    });
    const SocketAddress where = listener.local_address();
    client.emplace(HostPort{where.host(), where.port()}, job);
    accepting.join();
    control = std::move(job.control);
  }
  void send(std::span<const std::byte> bytes) const { server.send_all(bytes, soon()); }
  static Bytes bytes_of_rank_1(std::uint64_t sequence, const Bytes& data) {
    BulkHead head;
    head.tag = WireTag::kBytes;
    head.from = 1;
    head.stamp.sequence = sequence;
    head.count = head.stamp.payload = data.size();
    return encode_whole({head, data, {}});
  }

  Socket server;
  std::shared_ptr<ControlPlane> control;
  std::optional<RankClient> client;
};

MeshFrame call_of(std::uint64_t sequence) {
  MeshFrame stamp;
  stamp.sequence = sequence;
  return stamp;
}

// The bytes of a later call begin to arrive with the end of this one, and end in the later one.
TEST(RankClient, BytesThatComeHalfInOneCallAndHalfInTheNextArrive) {
  RankByHand rank;
  BulkHead sum;
  sum.tag = WireTag::kRawSum;
  sum.lanes = 2;
  sum.call = call_digest(call_of(1));
  Bytes all = encode_whole({sum, {}, {}});
  const Bytes data(1000, std::byte{42});
  const Bytes later = RankByHand::bytes_of_rank_1(2, data);
  all.insert(all.end(), later.begin(), later.begin() + 300);
  rank.send(all);
  rank.client->enter(call_of(1), soon());
  rank.client->add_up(2, {}, 0, {});

  Bytes got(data.size());
  const BytesIn in{1, got};
  rank.client->enter(call_of(2), soon());
  rank.send(std::span(later).subspan(300));
  rank.client->move_bytes({}, {&in, 1});
  EXPECT_EQ(got, data);
}

TEST(RankClient, BytesOfACallThatIsOverNameTheRank) {
  RankByHand rank;
  rank.send(RankByHand::bytes_of_rank_1(1, Bytes(3)));
  Bytes got(3);
  const BytesIn in{1, got};
  rank.client->enter(call_of(2), soon());
  const Error error = error_of([&] { rank.client->move_bytes({}, {&in, 1}); });
  EXPECT_EQ(error.code(), ErrorCode::kCollectiveMismatch);
  EXPECT_EQ(error.rank(), 1);
}

TEST(RankClient, ARankThatSendsFarAheadIsNamedAndNotKeptWithoutEnd) {
  RankByHand rank;
  const Bytes piece = RankByHand::bytes_of_rank_1(5, Bytes(kBytesPiece));
  auto sending = std::async(std::launch::async, [&] {
    try {
      for (std::size_t sent = 0; sent <= kMostEarly; sent += kBytesPiece) rank.send(piece);
    } catch (const Error&) {  // the client has gone
    }
  });
  Bytes got(3);
  const BytesIn in{1, got};
  rank.client->enter(call_of(1), soon());
  const Error error = error_of([&] { rank.client->move_bytes({}, {&in, 1}); });
  rank.client.reset();
  sending.get();
  EXPECT_EQ(error.code(), ErrorCode::kMessageTooLarge);
  EXPECT_EQ(error.rank(), 1);
}

// Bytes that are taken make room for others.
TEST(RankClient, OnlyBytesThatAreStillKeptCount) {
  RankByHand rank;
  constexpr std::uint64_t kTurns = kMostEarly / kBytesPiece + 10;
  const auto sum_of = [](std::uint64_t turn) { return call_of(2 * turn + 1); };
  const auto bytes_of = [](std::uint64_t turn) { return call_of(2 * turn + 2); };
  auto sending = std::async(std::launch::async, [&] {
    const Bytes data(kBytesPiece);
    for (std::uint64_t turn = 0; turn < kTurns; ++turn) {
      rank.send(RankByHand::bytes_of_rank_1(bytes_of(turn).sequence, data));
      BulkHead sum;
      sum.tag = WireTag::kRawSum;
      sum.step = turn;
      sum.lanes = 2;
      sum.call = call_digest(sum_of(turn));
      rank.send(encode_whole({sum, {}, {}}));
    }
  });
  Bytes got(kBytesPiece);
  const BytesIn in{1, got};
  for (std::uint64_t turn = 0; turn < kTurns; ++turn) {
    rank.client->enter(sum_of(turn), soon());
    rank.client->add_up(2, {}, 0, {});
    rank.client->enter(bytes_of(turn), soon());
    rank.client->move_bytes({}, {&in, 1});
  }
  sending.get();
}

}  // namespace
}  // namespace lockstep::rank_client_test
