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

}  // namespace
}  // namespace lockstep::worker_client_test
