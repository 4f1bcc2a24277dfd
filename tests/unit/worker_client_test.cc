#include "lockstep/server/worker_client.h"

#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <thread>

#include "lockstep/net/job/handshake.h"
#include "lockstep/net/job/job.h"
#include "lockstep/net/socket/unix_socket.h"
#include "tests/support/gradient_frames.h"
#include "tests/support/star.h"

namespace lockstep::worker_client_test {
namespace {

using namespace test;

// A coordinator whose every byte is up to the test, and its one worker.
struct WithCoordinatorByHand {
  WithCoordinatorByHand() {
    auto [ours, theirs] = unix_socket_pair();
    coordinator = std::move(ours);
    send(encode(JoinAccepted{0, 1}));
    send(encode(to_welcome(ServerSettings{})));
    client.emplace(std::move(theirs), WorkerOptions{});
  }
  void send(std::span<const std::byte> bytes) const { coordinator.send_all(bytes, soon()); }
  void wait_until_all_is_read() const {
    const Deadline deadline = soon();
    for (int unread = 1; unread > 0 && !deadline.expired(); std::this_thread::yield()) {
      ASSERT_EQ(::ioctl(coordinator.fd(), SIOCOUTQ, &unread), 0);
    }
  }
  Error error_of_next(std::uint64_t step) {
    std::vector<float> data(kFew);
    return error_of([&] { client->receive_averaged(step, data); });
  }

  static constexpr std::size_t kFew = 10;
  const Error reason{ErrorCode::kNonFinite, "worker 3 sent nan", 3};
  const std::vector<std::byte> halt =
      encode(Halt{{reason.code(), reason.rank(), std::string(reason.message())}});
  Socket coordinator;
  std::optional<WorkerClient> client;
};

TEST(WorkerClient, AHaltThatComesInPiecesIsHeard) {
  WithCoordinatorByHand world;
  world.client->send_gradient(0, std::vector<float>(world.kFew), 0, 0, 1);
  const auto halt = std::span(world.halt);
  world.send(halt.first(kFrameStartBytes + 2));
  std::thread later([&] {
    world.wait_until_all_is_read();
    world.send(halt.subspan(kFrameStartBytes + 2));
  });
  EXPECT_STREQ(world.error_of_next(0).what(), world.reason.what());
  later.join();
}

TEST(WorkerClient, WhoSendsToACoordinatorThatHasClosedStillHearsAllItSaid) {
  WithCoordinatorByHand world;
  world.client->send_gradient(0, std::vector<float>(world.kFew), 0, 0, 1);
  BulkHead head;
  head.tag = WireTag::kAveragedGradient;
  head.count = world.kFew;
  world.send(encode_gradient(head, std::vector<float>(world.kFew, 0.5F), {}));
  world.send(world.halt);
  ::shutdown(world.coordinator.fd(), SHUT_WR);

  // More than the socket holds, and nobody takes it.
  world.client->send_gradient(1, std::vector<float>(std::size_t{4} << 20), 0, 0, 1);
  std::vector<float> data(world.kFew);
  world.client->receive_averaged(0, data);
  EXPECT_EQ(data, std::vector<float>(world.kFew, 0.5F));
  EXPECT_STREQ(world.error_of_next(1).what(), world.reason.what());
}

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
    client->set_deadline(soon());
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
  std::unique_ptr<ControlPlane> control;
  std::optional<WorkerClient> client;
};

MeshFrame call_of(std::uint64_t sequence) {
  MeshFrame stamp;
  stamp.sequence = sequence;
  return stamp;
}

// The bytes of a later call begin to arrive with the end of this one, and end in the later one.
TEST(WorkerClient, BytesThatComeHalfInOneCallAndHalfInTheNextArrive) {
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
  rank.client->enter(call_of(1));
  rank.client->reduce_lanes(0, 0, 2, {}, 0, {});

  Bytes got(data.size());
  const BytesIn in{1, got};
  rank.client->enter(call_of(2));
  rank.send(std::span(later).subspan(300));
  rank.client->move_bytes({}, {&in, 1});
  EXPECT_EQ(got, data);
}

TEST(WorkerClient, BytesOfACallThatIsOverNameTheRank) {
  RankByHand rank;
  rank.send(RankByHand::bytes_of_rank_1(1, Bytes(3)));
  Bytes got(3);
  const BytesIn in{1, got};
  rank.client->enter(call_of(2));
  const Error error = error_of([&] { rank.client->move_bytes({}, {&in, 1}); });
  EXPECT_EQ(error.code(), ErrorCode::kCollectiveMismatch);
  EXPECT_EQ(error.rank(), 1);
}

}  // namespace
}  // namespace lockstep::worker_client_test
