#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <thread>

#include "tests/support/gradient_frames.h"
#include "tests/support/star.h"

namespace lockstep::gradient_server_faults_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace test;

// Worker `bad` of three does `harm` instead of sending its gradient; returns the server's error,
// after everybody else was seen to get the same.
Error halted_by(Star& star, const std::function<void(WorkerClient&)>& harm) {
  const auto errors = star.run(
      3, [&](GradientServer& server) { server.reduce(kVector); },
      [&](int i) {
        WorkerClient client(star.worker(i == 1 ? "culprit" : "innocent"));
        auto data = gradient(client.worker_id(), kCount);
        if (i == 1) {
          harm(client);
        } else {
          client.send_gradient(0, data, 0, 0, 1);
        }
        client.receive_averaged(0, data);
      });
  EXPECT_TRUE(errors[3]);
  if (!errors[3]) return Error(ErrorCode::kInvalidArgument, "none");
  for (const auto& error : errors) {
    expect_same(error, *errors[3]);
  }
  return *errors[3];
}

TEST(GradientServerFaults, ANonFiniteElementEndsTheJobForAllWithTheSameReason) {
  Star star(server_options(3));
  const Error error = halted_by(star, [](WorkerClient& client) {
    auto data = gradient(client.worker_id(), kCount);
    data[90001] = NAN;
    client.send_gradient(0, data, 0, 0, 1);
  });
  EXPECT_EQ(error.code(), ErrorCode::kNonFinite);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("culprit"), HasSubstr("step 1"), HasSubstr("nan"),
                                  HasSubstr("element 90001")));
  EXPECT_THAT(error_of([&] { star.server.reduce(kVector); }).what(), HasSubstr("culprit"));
}

TEST(GradientServerFaults, SoDoesAWrongStep) {
  Star star(server_options(3));
  const Error error = halted_by(
      star, [](WorkerClient& client) { client.send_gradient(4, gradient(0, kCount), 0, 0, 1); });
  EXPECT_EQ(error.code(), ErrorCode::kStepMismatch);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("culprit"), HasSubstr("step 5; step 1 is expected")));
}

TEST(GradientServerFaults, SoDoesAWorkerThatGivesUp) {
  Star star(server_options(3));
  const auto errors = star.run(
      3, [&](GradientServer& server) { server.reduce(kVector); },
      [&](int i) {
        WorkerClient client(star.worker(i == 1 ? "culprit" : "innocent"));
        star.wait_until_all_are_there();
        if (i == 1) return client.abort(Error(ErrorCode::kIo, "no more disk"));
        auto data = gradient(client.worker_id(), kCount);
        client.send_gradient(0, data, 0, 0, 1);
        client.receive_averaged(0, data);
      });
  for (const int i : {0, 2, 3}) {
    ASSERT_TRUE(errors[static_cast<std::size_t>(i)]);
    EXPECT_THAT(errors[static_cast<std::size_t>(i)]->what(),
                AllOf(HasSubstr("culprit"), HasSubstr("gave up: I/O error: no more disk")));
  }
}

// A worker may be busy with its last result for longer than the coordinator waits for it.
// Its reason stands behind a gradient that waits for the other worker's.
TEST(GradientServerFaults, SoDoesOneThatHasSentItsGradientBefore) {
  Star star(server_options(2));
  std::promise<void> gone;
  const auto errors = star.run(
      2, [&](GradientServer& server) { server.reduce(kVector); },
      [&](int i) {
        std::optional<WorkerClient> client(star.worker(i == 0 ? "quitter" : "other"));
        if (i == 0) {
          star.wait_until_all_are_there();
          client->send_gradient(0, std::vector<float>(10), 0, 0, 1);
          client->abort(Error(ErrorCode::kIo, "the disk is full"));
          client.reset();
          return gone.set_value();
        }
        gone.get_future().wait();
        std::vector<float> data(10);
        client->send_gradient(0, data, 0, 0, 1);
        client->receive_averaged(0, data);
      });
  for (const auto& error : {errors[1], errors[2]}) {
    ASSERT_TRUE(error);
    EXPECT_THAT(error->what(), HasSubstr("(quitter, "));
    EXPECT_THAT(error->what(), HasSubstr("gave up: I/O error: the disk is full"));
  }
}

TEST(GradientServerFaults, AWorkerThatIsLateForTheEndIsNotAtFault) {
  ServerOptions options = server_options(1);
  options.settings.timeout = 1s;
  Star star(options);
  std::promise<void> closed;
  const auto errors = star.run(
      1,
      [&](GradientServer& server) {
        server.broadcast(server.reduce(kVector));
        server.shutdown();
        closed.set_value();
      },
      [&](int) {
        WorkerClient client(star.worker());
        auto data = gradient(0, kCount);
        client.send_gradient(0, data, 0, 0, 1);
        client.receive_averaged(0, data);
        auto end = closed.get_future();
        end.wait();
        std::this_thread::sleep_for(300ms);  // so that heartbeats find nobody
        EXPECT_FALSE(client.next_shard());
      });
  expect_no_errors(errors);
}

// Two workers; the one by hand brings `bytes` of its payload and then falls silent or closes.
std::vector<std::optional<Error>> with_fault(Star& star, bool ours, std::size_t bytes, bool close) {
  std::promise<void> over;
  const auto until = over.get_future().share();
  return star.run(
      2,
      [&](GradientServer& server) {
        try {
          server.reduce(kVector);
        } catch (const Error&) {
          over.set_value();
          throw;
        }
      },
      [&](int i) {
        if (i == 0) {
          WorkerClient client(star.worker("innocent"));
          auto data = gradient(0, kCount);
          client.send_gradient(0, data, 0, 0, 1);
          client.receive_averaged(0, data);
        } else {
          WorkerByHand bad(star, ours);
          star.wait_until_all_are_there();
          const auto payload = encode_gradient(vector_head(0, kCount), gradient(0, kCount), {});
          bad.send(std::span(payload).first(bytes));
          if (!close) until.wait();
        }
      });
}

TEST(GradientServerFaults, AWorkerThatDiesIsNamedWhereverItIs) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{7}, kCount, kCount * 4 + 41}) {
    Star star(server_options(2));
    const auto errors = with_fault(star, true, bytes, true);
    ASSERT_TRUE(errors[2]);
    EXPECT_EQ(errors[2]->code(), ErrorCode::kPeerLost);
    EXPECT_THAT(errors[2]->what(), AllOf(HasSubstr("by-hand"), HasSubstr("closed its connection")));
    ASSERT_TRUE(errors[0]);
    EXPECT_STREQ(errors[0]->what(), errors[2]->what());
  }
}

TEST(GradientServerFaults, AWorkerThatDiesWhileItIsHeldBackIsNoticed) {
  Star star(server_options(2));
  std::promise<void> over;
  const auto errors = star.run(
      2,
      [&](GradientServer& server) {
        const Error error = error_of([&] { server.reduce(kVector); });
        EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
        EXPECT_THAT(error.what(), AllOf(HasSubstr("by-hand"), HasSubstr("closed its connection")));
        over.set_value();
      },
      [&](int i) {
        if (i == 0) {
          WorkerClient client(star.worker("slow"));
          return over.get_future().wait();
        }
        WorkerByHand bad(star, true);
        star.wait_until_all_are_there();
        const auto payload = encode_gradient(vector_head(0, kCount), gradient(0, kCount), {});
        bad.send(std::span(payload).first(kCount * 3));
      });
  expect_no_errors(errors);
}

TEST(GradientServerFaults, AWorkerThatFallsSilentIsDeadEvenWithinAPayload) {
  for (const std::size_t bytes : {std::size_t{0}, kCount}) {
    ServerOptions options = server_options(2);
    options.settings.timeout = 600ms;
    Star star(options);
    const auto start = std::chrono::steady_clock::now();
    const auto errors = with_fault(star, true, bytes, false);
    ASSERT_TRUE(errors[2]);
    EXPECT_EQ(errors[2]->code(), ErrorCode::kPeerLost);
    EXPECT_THAT(errors[2]->what(), AllOf(HasSubstr("nothing was heard of worker"),
                                         HasSubstr("by-hand"), HasSubstr("vector of step 1")));
    ASSERT_TRUE(errors[0]);
    EXPECT_STREQ(errors[0]->what(), errors[2]->what());
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  }
}

TEST(GradientServerFaults, AnOldWorkerMayComputeInSilenceButNotStopInAPayload) {
  ServerOptions options = server_options(2);
  options.settings.timeout = 400ms;
  {
    Star star(options);
    const auto errors = with_fault(star, false, kCount, false);
    ASSERT_TRUE(errors[2]);
    EXPECT_EQ(errors[2]->code(), ErrorCode::kPeerLost);
    EXPECT_THAT(errors[2]->what(), HasSubstr("by-hand"));
  }
  Star star(options);
  const auto errors = with_fault(star, false, 0, false);
  ASSERT_TRUE(errors[2]);
  EXPECT_EQ(errors[2]->code(), ErrorCode::kTimeout);  // after ten times the timeout
  EXPECT_THAT(errors[2]->what(), AllOf(HasSubstr("by-hand"), HasSubstr("within 4s")));
}

TEST(GradientServerFaults, ACoordinatorThatGoesIsNoticed) {
  ServerOptions options = server_options(1);
  options.settings.timeout = 300ms;
  auto star = std::make_unique<Star>(options);
  std::promise<void> joined;
  const auto errors = run_ranks(2, [&](int i) {
    if (i == 0) {
      WorkerClient client(star->worker());
      joined.set_value();
      client.next_shard();
    } else {
      star->server.wait_for_workers();
      joined.get_future().wait();  // from here on it is silent
    }
  });
  ASSERT_TRUE(errors[0]);
  EXPECT_EQ(errors[0]->code(), ErrorCode::kPeerLost);
  EXPECT_THAT(errors[0]->what(), HasSubstr("nothing was heard of the coordinator"));
}

TEST(GradientServerFaults, TooLargeAFrameEndsTheJob) {
  ServerOptions options = server_options(1);
  options.settings.largest_frame = 1000;
  Star star(options);
  const auto errors = star.run(
      1, [&](GradientServer& server) { server.reduce(kVector); },
      [&](int) {
        WorkerByHand bad(star, false);
        bad.send(encode_head(vector_head(0, 1000)));
        EXPECT_TRUE(bad.rest().empty());  // an orderly close, and no extension
      });
  expect_no_errors({errors[0]});
  ASSERT_TRUE(errors[1]);
  EXPECT_EQ(errors[1]->code(), ErrorCode::kMessageTooLarge);
  EXPECT_THAT(errors[1]->what(), HasSubstr("1000 are allowed"));
}

TEST(GradientServerFaults, StrangersDisturbNobody) {
  Star star(server_options(2));
  std::vector<Socket> strangers;
  for (int i = 0; i < 50; ++i) strangers.push_back(connect_tcp(star.where, soon()));
  const std::string noise = "GET / HTTP/1.1\r\n\r\n";
  for (int i = 0; i < 10; ++i) strangers[i].send_all(std::as_bytes(std::span(noise)), soon());
  ByteWriter huge;
  huge.u32_big_endian(0x0000ffff);
  huge.u8(0x01);
  strangers[11].send_all(huge.written(), soon());
  const auto wrong = encode(Shutdown{});
  strangers[12].send_all(wrong, soon());
  const auto errors = star.run(
      2,
      [&](GradientServer& server) {
        server.broadcast(server.reduce(kVector));
        server.shutdown();
      },
      [&](int) {
        WorkerClient client(star.worker());
        auto data = gradient(client.worker_id(), 10);
        client.send_gradient(0, data, 0, 0, 1);
        client.receive_averaged(0, data);
        EXPECT_FALSE(client.next_shard());
      });
  expect_no_errors(errors);
}

}  // namespace
}  // namespace lockstep::gradient_server_faults_test
