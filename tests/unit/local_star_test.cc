#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "lockstep/base/index.h"
#include "lockstep/server/gradient_server.h"
#include "tests/support/star.h"

namespace lockstep::local_star_test {
namespace {

using namespace test;
using ::testing::HasSubstr;

TEST(LocalStar, AllThreeKinds) {
  LocalStar star = make_local_star(server_options(2, Average::kWeighted));
  const auto expected = average({50, 50}, kCount, Average::kWeighted);
  const auto mean = average({1, 1}, kCount);  // blocks have no weights
  const auto errors = run_ranks(3, [&](int rank) {
    if (rank == 2) {
      GradientServer& server = *star.server;
      server.wait_for_workers();
      server.send_shards(5);
      server.broadcast(server.reduce({RoundKind::kVector, 5, {}, 0}));
      server.broadcast(server.reduce({RoundKind::kBlock, 5, {}, 0}));
      server.broadcast(server.reduce({RoundKind::kComponent, 5, {}, 2}));
      return server.shutdown();
    }
    const WorkerOptions options;
    WorkerClient client(std::move(star.ends[index_of(rank)]), options);
    const auto shard = client.next_shard();
    ASSERT_TRUE(shard);
    auto data = gradient(rank, kCount);
    client.send_gradient(5, data, 1, 1, shard->size());
    client.receive_averaged(5, data);
    EXPECT_EQ(data, expected);
    data = gradient(rank, kCount);
    client.send_block(5, 0, 1, data, std::vector<std::uint32_t>{kCount});
    client.receive_averaged_block(5, 0, data);
    EXPECT_EQ(data, mean);
    data = gradient(rank, kCount);
    client.send_component(5, 2, data);
    client.receive_averaged_component(5, 2, data);
    EXPECT_EQ(data, mean);
    EXPECT_FALSE(client.next_shard());
  });
  expect_no_errors(errors);
}

// The server finds out by sending, before it has read that the worker closed.
TEST(LocalStar, WhoIsGoneWhenAShardIsSentToItIsNamed) {
  ServerOptions options = server_options(2);
  options.settings.timeout = 1s;
  LocalStar star = make_local_star(options);
  std::vector<std::optional<WorkerClient>> clients(2);
  expect_no_errors(run_ranks(3, [&](int rank) {
    if (rank == 2) return star.server->wait_for_workers();
    const auto i = index_of(rank);
    clients[i].emplace(std::move(star.ends[i]), WorkerOptions{});
  }));
  clients[1].reset();
  const Error error = error_of([&] { star.server->send_shards(0); });
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(error.rank(), 1);
  EXPECT_THAT(error.what(), HasSubstr("closed its connection"));
  // The other computes for longer than the timeout. It has its shard still to read, and then why
  // there is no more.
  std::this_thread::sleep_for(2500ms);
  EXPECT_EQ(clients[0]->next_shard(), shard_of(0, 100, 2, 0));
  expect_same(error_of([&] { clients[0]->next_shard(); }), error);
}

}  // namespace
}  // namespace lockstep::local_star_test
