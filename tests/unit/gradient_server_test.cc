#include "lockstep/server/gradient_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tests/support/star.h"

namespace lockstep::gradient_server_test {
namespace {

using ::testing::HasSubstr;
using namespace test;

TEST(GradientServer, OneJobOfAllThreeKinds) {
  Star star(server_options(3));
  const auto expected = average({1, 1, 1}, kCount);
  const std::vector<std::uint32_t> sizes = {3, 100000};
  const auto errors = star.run(
      3,
      [&](GradientServer& server) {
        for (std::uint64_t step = 0; step < 3; ++step) {
          server.send_shards(step);
          RoundResult result = server.reduce({RoundKind::kVector, step, {}, 0});
          EXPECT_EQ(result.total, 100U);
          server.broadcast(result);
          result = server.reduce({RoundKind::kBlock, step, {}, 0});
          EXPECT_EQ(result.key.block, 1U);
          EXPECT_EQ(result.component_sizes, sizes);
          server.broadcast(result);
          server.broadcast(server.reduce({RoundKind::kBlock, step, 0, 0}));
          for (std::uint8_t i = 0; i < kComponents; ++i) {
            server.broadcast(server.reduce({RoundKind::kComponent, step, {}, i}));
          }
        }
        server.shutdown();
      },
      [&](int) {
        WorkerClient client(star.worker());
        EXPECT_EQ(client.total_workers(), 3);
        EXPECT_EQ(client.settings()->total_samples, 100U);
        int steps = 0;
        while (const auto shard = client.next_shard()) {
          const std::uint64_t step = shard->step;
          EXPECT_EQ(*shard, shard_of(step, 100, 3, client.worker_id()));
          EXPECT_EQ(shard->size(), client.worker_id() == 2 ? 34U : 33U);
          auto data = gradient(client.worker_id(), kCount);
          client.send_gradient(step, data, 0.5F, 1, shard->size());
          EXPECT_EQ(client.receive_averaged(step, data), 0.5F);
          EXPECT_EQ(data, expected);
          for (const std::uint32_t block : {1, 0}) {
            data = gradient(client.worker_id(), kCount);
            client.send_block(step, block, 2, data, sizes);
            EXPECT_EQ(client.receive_averaged_block(step, block, data), sizes);
            EXPECT_EQ(data, expected);
          }
          for (std::uint8_t i = 0; i < kComponents; ++i) {
            data = gradient(client.worker_id(), kCount);
            client.send_component(step, i, data);
            client.receive_averaged_component(step, i, data);
            EXPECT_EQ(data, expected);
          }
          ++steps;
        }
        EXPECT_EQ(steps, 3);
      });
  expect_no_errors(errors);
}

// As the original's trainers do it: nobody deals out samples, nobody says Shutdown.
TEST(GradientServer, TheWorkersOfBlocksDecideHowManyStepsThereAre) {
  Star star(server_options(3));
  const auto expected = average({1, 1, 1}, kCount);
  const std::vector<std::uint32_t> sizes = {kCount};
  EXPECT_EQ(star.server.worker_count(), 0);
  const auto errors = star.run(
      3,
      [&](GradientServer& server) {
        std::uint64_t step = 0;
        for (; server.await_step(step); ++step) {
          EXPECT_EQ(server.worker_count(), 3);
          server.broadcast(server.reduce({RoundKind::kBlock, step, {}, 0}));
        }
        EXPECT_EQ(step, 2U);
        EXPECT_EQ(server.worker_count(), 0);
      },
      [&](int i) {
        WorkerOptions options = star.worker();
        options.original = i == 1;
        WorkerClient client(options);
        for (std::uint64_t step = 0; step < 2; ++step) {
          auto data = gradient(client.worker_id(), kCount);
          client.send_block(step, 0, 1, data, sizes);
          EXPECT_EQ(client.receive_averaged_block(step, 0, data), sizes);
          EXPECT_EQ(data, expected);
        }
      });
  expect_no_errors(errors);
}

TEST(GradientServer, WhoLeavesBlocksBeforeTheOthersIsNamed) {
  Star star(server_options(2));
  std::promise<void> left;
  const auto errors = star.run(
      2,
      [&](GradientServer& server) {
        ASSERT_TRUE(server.await_step(0));
        server.broadcast(server.reduce({RoundKind::kBlock, 0, {}, 0}));
        server.await_step(1);
      },
      [&](int i) {
        std::optional<WorkerClient> client(star.worker(i == 0 ? "early" : "loyal"));
        std::vector<float> data(kCount);
        const std::vector<std::uint32_t> sizes = {kCount};
        client->send_block(0, 0, 1, data, sizes);
        client->receive_averaged_block(0, 0, data);
        if (i == 0) {
          client.reset();
          return left.set_value();
        }
        left.get_future().wait();
        client->send_block(1, 0, 1, data, sizes);
        client->receive_averaged_block(1, 0, data);
      });
  for (const auto& error : {errors[1], errors[2]}) {  // the loyal one and the server
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kPeerLost);
    EXPECT_THAT(error->what(), HasSubstr("(early, "));
    EXPECT_THAT(error->what(),
                HasSubstr("closed its connection; it owes its part of step 2 (mode blocks)"));
  }
}

TEST(GradientServer, AShutdownEndsWorkersOfBlocks) {
  Star star(server_options(1));
  const auto errors = star.run(
      1,
      [&](GradientServer& server) {
        ASSERT_TRUE(server.await_step(0));
        server.broadcast(server.reduce({RoundKind::kBlock, 0, {}, 0}));
        server.shutdown();
      },
      [&](int) {
        WorkerClient client(star.worker());
        std::vector<float> data(kCount);
        const std::vector<std::uint32_t> sizes = {kCount};
        client.send_block(0, 0, 1, data, sizes);
        EXPECT_TRUE(client.receive_averaged_block(0, 0, data));
        client.send_block(1, 0, 1, data, sizes);
        EXPECT_FALSE(client.receive_averaged_block(1, 0, data));
      });
  expect_no_errors(errors);
}

TEST(GradientServer, TotalSamplesMayChangeBetweenSteps) {
  Star star(server_options(2));
  const std::vector<std::uint64_t> totals = {100, 7, 0};
  const auto errors = star.run(
      2,
      [&](GradientServer& server) {
        for (std::uint64_t step = 0; step < totals.size(); ++step) {
          server.set_total_samples(totals[step]);
          server.send_shards(step);
        }
        server.shutdown();
      },
      [&](int) {
        WorkerClient client(star.worker());
        for (std::uint64_t step = 0; step < totals.size(); ++step) {
          EXPECT_EQ(client.next_shard(), shard_of(step, totals[step], 2, client.worker_id()));
        }
        EXPECT_FALSE(client.next_shard());
      });
  expect_no_errors(errors);
}

TEST(GradientServer, WeighsOldAndNewWorkersAlike) {
  Star star(server_options(3, Average::kWeighted));
  const std::vector<std::uint64_t> weights = {10, 7, 0};
  const auto expected = average(weights, kCount, Average::kWeighted);
  const auto errors = star.run(
      3,
      [&](GradientServer& server) {
        for (std::uint64_t step = 0; step < 2; ++step) {
          const RoundResult result = server.reduce({RoundKind::kVector, step, {}, 0});
          EXPECT_EQ(result.total, 17U);
          EXPECT_EQ(result.correct, 12U);
          server.broadcast(result);
        }
        server.shutdown();
      },
      [&](int i) {
        WorkerOptions options = star.worker();
        options.original = i == 1;
        WorkerClient client(options);
        const auto weight = weights[static_cast<std::size_t>(client.worker_id())];
        for (std::uint64_t step = 0; step < 2; ++step) {
          auto data = gradient(client.worker_id(), kCount);
          client.send_gradient(step, data, 1, 4, weight);
          EXPECT_EQ(client.receive_averaged(step, data), 1);
          EXPECT_EQ(data, expected);
        }
        EXPECT_FALSE(client.next_shard());
      });
  expect_no_errors(errors);
}

TEST(GradientServer, AWorkerMaySendAheadWithoutReceiving) {
  Star star(server_options(2));
  const auto expected = average({1, 1}, kCount);
  const auto errors = star.run(
      2,
      [&](GradientServer& server) {
        for (std::uint8_t i = 0; i < 8; ++i) {
          server.broadcast(server.reduce({RoundKind::kComponent, i, {}, 0}));
        }
        server.shutdown();
      },
      [&](int) {
        WorkerClient client(star.worker());
        auto data = gradient(client.worker_id(), kCount);
        for (std::uint8_t i = 0; i < 8; ++i) client.send_component(i, 0, data);
        for (std::uint8_t i = 0; i < 8; ++i) {
          client.receive_averaged_component(i, 0, data);
          EXPECT_EQ(data, expected);
        }
        EXPECT_FALSE(client.next_shard());
      });
  expect_no_errors(errors);
}

TEST(GradientServer, AFastWorkerIsHeldBack) {
  Star star(server_options(2));
  constexpr std::size_t kLarge = 16 << 20;  // elements
  std::atomic<std::size_t> sent = 0;
  std::promise<void> filled;
  const auto errors = star.run(
      2,
      [&](GradientServer& server) {
        server.broadcast(server.reduce(kVector));
        server.shutdown();
      },
      [&](int i) {
        if (i == 0) {
          WorkerByHand fast(star, false);
          fast.send(encode_head(vector_head(0, kLarge)));
          const std::vector<std::byte> zeros(1 << 20);
          // It may fill the window and the system's buffers; then nobody takes more.
          pollfd entry{fast.socket.fd(), POLLOUT, 0};
          while (::poll(&entry, 1, 300) == 1) sent += fast.socket.try_send(zeros).value_or(0);
          EXPECT_LT(sent, kLarge * sizeof(float) / 2);
          filled.set_value();
          while (sent < kLarge * sizeof(float)) {
            const std::size_t size = std::min(zeros.size(), kLarge * sizeof(float) - sent);
            fast.send(std::span(zeros).first(size));
            sent += size;
          }
          fast.send(encode_foot(vector_head(0, kLarge), {}));
          EXPECT_EQ(fast.receive_body().size(), 1 + 8 + 8 + kLarge * sizeof(float) + 4);
          EXPECT_TRUE(std::holds_alternative<Shutdown>(fast.receive()));
        } else {
          WorkerClient slow(star.worker());
          filled.get_future().wait();
          std::vector<float> data(kLarge);
          slow.send_gradient(0, data, 0, 0, 0);
          slow.receive_averaged(0, data);
          EXPECT_FALSE(slow.next_shard());
        }
      });
  expect_no_errors(errors);
}

TEST(GradientServer, HeartbeatsCarryASlowWorker) {
  ServerOptions options = server_options(2);
  options.settings.timeout = 1s;
  Star star(options);
  const auto errors = star.run(
      2,
      [&](GradientServer& server) {
        server.broadcast(server.reduce(kVector));
        server.shutdown();
      },
      [&](int i) {
        WorkerClient client(star.worker());
        auto data = gradient(0, kCount);
        if (i == 1) {  // computes for several timeouts
          const auto until = Deadline::after(2500ms);
          while (!until.expired()) data = gradient(1, kCount);
        }
        client.send_gradient(0, data, 0, 0, 1);
        client.receive_averaged(0, data);
        EXPECT_FALSE(client.next_shard());
      });
  expect_no_errors(errors);
}

TEST(GradientServer, RefusesLateJoinersWithAReason) {
  Star star(server_options(1));
  const auto errors = star.run(
      1,
      [&](GradientServer& server) {
        server.broadcast(server.reduce(kVector));
        server.shutdown();
      },
      [&](int) {
        WorkerClient client(star.worker());
        const Error error = error_of([&] { WorkerClient late(star.worker("late")); });
        EXPECT_THAT(error.what(), HasSubstr("runs already with all its 1 workers"));
        std::vector<float> data(1);
        client.send_gradient(0, data, 0, 0, 1);
        client.receive_averaged(0, data);
      });
  expect_no_errors(errors);
}

TEST(GradientServer, AWorkerThatLeavesBeforeAllAreThereIsReplaced) {
  Star star(server_options(2));
  std::promise<void> left;
  star.server.set_notice([&](const std::string& text) {
    if (text.ends_with("its place is free again")) left.set_value();
  });
  const auto errors = star.run(
      1, [&](GradientServer& server) { server.shutdown(); },
      [&](int) {
        {
          WorkerClient first(star.worker("first"));
          first.send_component(0, 0, std::vector<float>(10));  // too early, and forgotten
        }
        left.get_future().wait();
        std::optional<WorkerClient> second;
        std::optional<WorkerClient> third;
        second.emplace(star.worker("second"));
        third.emplace(star.worker("third"));
        EXPECT_EQ(second->worker_id() + third->worker_id(), 1);
        EXPECT_FALSE(second->next_shard());
        EXPECT_FALSE(third->next_shard());
      });
  expect_no_errors(errors);
}

TEST(GradientServer, TokensAreProven) {
  for (const bool insecure : {false, true}) {
    Star star(server_options(1), "secret", insecure);
    const auto errors = star.run(
        1, [&](GradientServer& server) { server.shutdown(); },
        [&](int) {
          WorkerOptions worker = star.worker();
          worker.token = "wrong";
          Error error = error_of([&] { WorkerClient client(worker); });
          EXPECT_EQ(error.code(), ErrorCode::kAuthentication);
          worker.token = "";
          if (!insecure) {
            error = error_of([&] { WorkerClient client(worker); });
            EXPECT_EQ(error.code(), ErrorCode::kAuthentication);
            worker.original = true;
            error = error_of([&] { WorkerClient client(worker); });
            EXPECT_EQ(error.code(), ErrorCode::kPeerLost);  // it cannot be told
            worker.original = false;
            worker.token = "secret";
          }
          WorkerClient client(worker);
          EXPECT_FALSE(client.next_shard());
        });
    expect_no_errors(errors);
  }
}

TEST(GradientServer, OnlyLoopbackWithoutAToken) {
  const Error error = error_of([] { listen_for_workers({"0.0.0.0", 0}, "", soon()); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_TRUE(listen_for_workers({"0.0.0.0", 0}, "sixteen letters!", soon()));
  EXPECT_TRUE(listen_for_workers({"127.0.0.1", 0}, "", soon()));
}

// Lanes dealt out in every which way, over channels of one process; the bits are the tree's.
}  // namespace
}  // namespace lockstep::gradient_server_test
