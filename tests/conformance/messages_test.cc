// Point-to-point messages on every medium.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/support/build_kind.h"
#include "tests/support/places.h"

namespace lockstep::test::messages_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

std::vector<std::byte> pattern(std::size_t size, unsigned seed) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>((i * 7 + seed) % 251);
  return bytes;
}

class Messages : public testing::TestWithParam<Place> {
 protected:
  Messages() : threads_(GetParam().world_size) {
    GroupOptions options;
    options.medium = GetParam().medium;
    options.world_size = GetParam().world_size;
    options.timeout = 10s;
    transports_ = make_transports(options);
  }

  Transport& at(int rank) { return *transports_[static_cast<std::size_t>(rank)]; }
  int world_size() const { return GetParam().world_size; }
  static Deadline soon() { return Deadline::after(30s); }

  // The error that each rank ended with.
  std::vector<std::optional<Error>> on_all_ranks(const std::function<void(Transport&)>& body) {
    std::vector<std::optional<Error>> errors(transports_.size());
    threads_.run([&](int rank) {
      try {
        body(at(rank));
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(rank)] = error;
      }
    });
    return errors;
  }
  void expect_success(const std::function<void(Transport&)>& body) {
    const auto errors = on_all_ranks(body);
    for (std::size_t r = 0; r < errors.size(); ++r) {
      if (errors[r]) ADD_FAILURE() << "rank " << r << ": " << errors[r]->what();
    }
  }

  RankThreads threads_;
  std::vector<std::unique_ptr<Transport>> transports_;
};

TEST_P(Messages, RanksKnowTheirPlace) {
  for (int r = 0; r < world_size(); ++r) {
    EXPECT_EQ(at(r).rank(), r);
    EXPECT_EQ(at(r).world_size(), world_size());
    EXPECT_THAT(at(r).name_of(r), HasSubstr("rank " + std::to_string(r)));
  }
}

TEST_P(Messages, ArriveInOrder) {
  const auto first = pattern(4, 1);
  const auto empty = pattern(0, 0);
  const auto last = pattern(5000, 2);
  expect_success([&](Transport& transport) {
    if (transport.rank() == 0) {
      for (int to = 1; to < world_size(); ++to) {
        for (const auto* message : {&first, &empty, &last}) transport.send(to, *message, soon());
      }
      return;
    }
    for (const auto* message : {&first, &empty, &last}) {
      std::vector<std::byte> got(message->size());
      transport.recv(0, got, soon());
      EXPECT_EQ(got, *message);
    }
  });
}

// Larger than any buffer on the way: only full duplex gets it through.
TEST_P(Messages, LargeOnesCross) {
  constexpr std::size_t kSize = 8 << 20;
  expect_success([&](Transport& transport) {
    const int ahead = (transport.rank() + 1) % world_size();
    const int behind = (transport.rank() + world_size() - 1) % world_size();
    std::vector<std::byte> got(kSize);
    transport.exchange(ahead, pattern(kSize, static_cast<unsigned>(transport.rank())), behind, got,
                       soon());
    EXPECT_EQ(got, pattern(kSize, static_cast<unsigned>(behind)));
  });
}

TEST_P(Messages, ThreadsUseDifferentPeers) {
  expect_success([&](Transport& transport) {
    std::vector<std::thread> threads;
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer == transport.rank()) continue;
      threads.emplace_back([&, peer] {
        for (unsigned i = 0; i < 20; ++i) {
          const auto sent = pattern(10'000, i + static_cast<unsigned>(transport.rank()));
          std::vector<std::byte> got(sent.size());
          transport.exchange(peer, sent, peer, got, soon());
          EXPECT_EQ(got, pattern(sent.size(), i + static_cast<unsigned>(peer)));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

TEST_P(Messages, BarrierHoldsUntilAllHaveCome) {
  std::atomic<int> entered{0};
  expect_success([&](Transport& transport) {
    for (int round = 1; round <= 20; ++round) {
      entered.fetch_add(1);
      transport.barrier(soon());
      EXPECT_GE(entered.load(), round * world_size());
    }
  });
}

TEST_P(Messages, PeersMustExist) {
  std::vector<std::byte> data(4);
  for (const int peer : {-1, world_size(), world_size() + 5}) {
    for (const bool sending : {true, false}) {
      try {
        sending ? at(0).send(peer, data, soon()) : at(0).recv(peer, data, soon());
        ADD_FAILURE() << "rank " << peer << " was accepted";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kInvalidRank) << error.what();
        EXPECT_THAT(error.what(), HasSubstr(std::to_string(peer)));
      }
    }
  }
}

TEST_P(Messages, NotToOneself) {
  std::vector<std::byte> data(4);
  const auto expect_self_send = [&](const std::function<void()>& body) {
    try {
      body();
      ADD_FAILURE() << "a message to oneself was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kSelfSend) << error.what();
      EXPECT_EQ(error.rank(), 1);
    }
  };
  expect_self_send([&] { at(1).send(1, data, soon()); });
  expect_self_send([&] { at(1).recv(1, data, soon()); });
  expect_self_send([&] { at(1).exchange(1, data, 0, data, soon()); });
  expect_self_send([&] { at(1).exchange(0, data, 1, data, soon()); });
  // Wrong usage is no failure of the group.
  expect_success([&](Transport& transport) { transport.barrier(soon()); });
}

TEST_P(Messages, ReceivingInVainEndsInTime) {
  expect_success([&](Transport& transport) { transport.barrier(soon()); });
  std::vector<std::byte> data(4);
  const auto start = Deadline::Clock::now();
  const auto receive = [&] { at(0).recv(1, data, Deadline::after(100ms)); };
  std::optional<Error> seen;
  try {
    receive();
  } catch (const Error& error) {
    seen = error;
  }
  const auto took = Deadline::Clock::now() - start;
  ASSERT_TRUE(seen);
  EXPECT_EQ(seen->code(), ErrorCode::kTimeout) << seen->what();
  EXPECT_EQ(seen->rank(), 1);
  EXPECT_THAT(seen->what(), HasSubstr("rank 1"));
  EXPECT_GE(took, 100ms);
  EXPECT_LT(took, 100ms + 1s + kSlack);
  // The group is dead, on this rank and on the others.
  const auto errors = on_all_ranks([&](Transport& transport) { transport.barrier(soon()); });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kTimeout) << error->what();
    EXPECT_THAT(error->what(), HasSubstr("rank 1"));
  }
}

// As often as one likes; what comes later is received as if nobody had looked before.
TEST_P(Messages, ReceivingForAWhileLeavesTheGroupAsItWas) {
  const auto message = pattern(1000, 3);
  std::atomic<bool> looked = false;
  expect_success([&](Transport& transport) {
    transport.barrier(soon());
    std::vector<std::byte> data(message.size());
    if (transport.rank() == 0) {
      for (int i = 0; i < 3; ++i) {
        const auto start = Deadline::Clock::now();
        const auto limit = i == 0 ? 0ms : 60ms;
        EXPECT_FALSE(transport.recv_if_begun(1, data, Deadline::after(limit), soon()));
        EXPECT_GE(Deadline::Clock::now() - start, limit);
        EXPECT_LT(Deadline::Clock::now() - start, limit + 1s + kSlack);
      }
      // The other direction goes on meanwhile.
      transport.send(1, message, soon());
      looked = true;
      EXPECT_TRUE(transport.recv_if_begun(1, data, soon(), soon()));
      EXPECT_EQ(data, message);
      transport.recv(1, data, soon());
      EXPECT_EQ(data, message);
    }
    if (transport.rank() == 1) {
      while (!looked) std::this_thread::yield();
      transport.recv(0, data, soon());
      EXPECT_EQ(data, message);
      for (int i = 0; i < 2; ++i) transport.send(0, message, soon());
    }
    transport.barrier(soon());
  });
}

// More than the streams hold: half of it is no reason to come back without it.
TEST_P(Messages, AMessageThatHasBegunIsReceivedWhole) {
  const auto message = pattern(std::size_t{8} << 20, 5);
  expect_success([&](Transport& transport) {
    std::vector<std::byte> data(message.size());
    if (transport.rank() == 0) {
      while (!transport.recv_if_begun(1, data, Deadline::after(1ms), soon())) {
      }
      EXPECT_EQ(data, message);
    }
    if (transport.rank() == 1) transport.send(0, message, soon());
    transport.barrier(soon());
  });
}

TEST_P(Messages, ASmallSendDoesNotWaitForItsReader) {
  const auto message = pattern(kSentAhead, 7);
  expect_success([&](Transport& transport) { transport.barrier(soon()); });
  at(0).send(1, message, soon());  // nobody runs at rank 1
  std::vector<std::byte> data(message.size());
  at(1).recv(0, data, soon());
  EXPECT_EQ(data, message);
}

TEST_P(Messages, SizesMustAgree) {
  const auto errors = on_all_ranks([&](Transport& transport) {
    std::vector<std::byte> data(transport.rank() == 0 ? 1234 : 4321);
    if (transport.rank() == 0) transport.send(1, data, soon());
    if (transport.rank() == 1) transport.recv(0, data, soon());
    transport.barrier(soon());
  });
  for (std::size_t r = 0; r < errors.size(); ++r) {
    ASSERT_TRUE(errors[r]) << "rank " << r;
    EXPECT_EQ(errors[r]->code(), ErrorCode::kSizeMismatch) << errors[r]->what();
    EXPECT_EQ(errors[r]->rank(), 0);
    EXPECT_THAT(errors[r]->what(), HasSubstr("1234"));
    EXPECT_THAT(errors[r]->what(), HasSubstr("4321"));
  }
}

TEST_P(Messages, AbortEndsWaitingAtOnce) {
  expect_success([&](Transport& transport) { transport.barrier(soon()); });
  Deadline::Clock::time_point aborted;
  const auto errors = on_all_ranks([&](Transport& transport) {
    if (transport.rank() == 1) {
      aborted = Deadline::Clock::now();
      transport.abort("enough of this");
      return;
    }
    std::vector<std::byte> data(1);
    transport.recv(1, data, soon());
  });
  EXPECT_LT(Deadline::Clock::now() - aborted, kSlack);
  for (std::size_t r = 0; r < errors.size(); ++r) {
    if (r == 1) continue;
    ASSERT_TRUE(errors[r]) << "rank " << r;
    EXPECT_EQ(errors[r]->code(), ErrorCode::kAborted) << errors[r]->what();
    EXPECT_THAT(errors[r]->what(), HasSubstr("enough of this"));
    EXPECT_THAT(errors[r]->what(), HasSubstr("rank 1"));
  }
}

constexpr int kSizes[] = {2, 4};
INSTANTIATE_TEST_SUITE_P(All, Messages,
                         testing::ValuesIn(places({GroupMedium::kLocal, GroupMedium::kTcp,
                                                   GroupMedium::kTcpV6, GroupMedium::kTcpSealed,
                                                   GroupMedium::kShm},
                                                  kSizes)),
                         place_name);

TEST(MessagesAlone, AGroupNeedsARank) {
  for (const int world_size : {0, -3}) {
    try {
      make_local_group(world_size);
      ADD_FAILURE() << "a group of " << world_size;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidWorldSize);
    }
  }
}

TEST(MessagesAlone, AWorldOfOneHasNobodyToTalkTo) {
  for (const GroupMedium medium : {GroupMedium::kLocal, GroupMedium::kTcp, GroupMedium::kShm}) {
    GroupOptions options;
    options.medium = medium;
    const auto transports = make_transports(options);
    EXPECT_EQ(transports[0]->world_size(), 1);
    transports[0]->barrier(Deadline::after(1s));
    EXPECT_THROW(transports[0]->send(0, {}, Deadline::after(1s)), Error);
  }
}

}  // namespace
}  // namespace lockstep::test::messages_test
