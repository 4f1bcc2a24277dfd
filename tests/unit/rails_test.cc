#include "lockstep/comm/collectives/rails.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "lockstep/base/index.h"
#include "lockstep/comm/transport/local_group.h"
#include "tests/support/build_kind.h"
#include "tests/support/ranks.h"

namespace lockstep::rails_test {
namespace {

using namespace test;

constexpr std::size_t kMiB = 1024 * 1024;

TEST(Rails, AreAsManyAsTheBytesAreWorth) {
  EXPECT_EQ(rails_for(0, 2, 4), 1);
  EXPECT_EQ(rails_for(kMiB - 1, 2, 4), 1);
  EXPECT_EQ(rails_for(kMiB, 2, 4), 2);
  EXPECT_EQ(rails_for(2 * kMiB, 2, 4), 4);
  EXPECT_EQ(rails_for(64 * kMiB, 2, 4), 4);
  EXPECT_EQ(rails_for(64 * kMiB, 2, 1), 1);
}

TEST(Rails, AreAsManyAsAChunkIsWorth) {
  EXPECT_EQ(rails_for(kMiB, 8, 4), 2);
  EXPECT_EQ(rails_for(kMiB, 16, 4), 1);
  EXPECT_EQ(rails_for(2 * kMiB - 1, 16, 4), 1);
  EXPECT_EQ(rails_for(2 * kMiB, 16, 4), 2);
  EXPECT_EQ(rails_for(kMiB, 512, 4), 1);
}

TEST(Rails, AreAsManyAsThereMayBeConnections) {
  EXPECT_EQ(rails_for(1024 * kMiB, 64, 4), 4);
  EXPECT_EQ(rails_for(1024 * kMiB, 65, 4), 3);
  EXPECT_EQ(rails_for(1024 * kMiB, 128, 4), 2);
  EXPECT_EQ(rails_for(1024 * kMiB, 129, 4), 1);
  EXPECT_EQ(rails_for(1024 * kMiB, 1000, 4), 1);
}

// Two ranks with three rails between them.
class TwoRanks {
 public:
  TwoRanks() {
    LocalOptions options;
    options.shared_memory = false;
    transports_ = make_local_group(2, options);
    for (const auto& transport : transports_) {
      rails_.push_back(std::make_unique<Rails>(*transport, scratch_[rails_.size()], kRails, 0));
    }
  }

  Transport& transport(int rank) { return *transports_[index_of(rank)]; }
  // Calls body on every rail of both ranks, and returns what Rails::run threw at each.
  template <typename Body>
  std::vector<std::optional<Error>> run(const Body& body) {
    return run_ranks(2, [&](int rank) {
      rails_[index_of(rank)]->run(
          kRails, [&](Transport& transport, Scratch&, int rail) { body(rank, rail, transport); });
    });
  }

  static constexpr int kRails = 3;

 private:
  std::vector<std::unique_ptr<Transport>> transports_;
  std::array<Scratch, 2> scratch_;
  std::vector<std::unique_ptr<Rails>> rails_;
};

void send_and_receive(Transport& transport) {
  std::array<std::byte, 4> word{};
  const int peer = 1 - transport.rank();
  transport.exchange(peer, word, peer, word, soon());
}

TEST(Rails, HaveConnectionsOfTheirOwn) {
  TwoRanks ranks;
  const auto errors = ranks.run([](int rank, int rail, Transport& transport) {
    std::array<std::byte, 1> word{std::byte(rail)};
    if (rank == 0) return transport.send(1, word, soon());
    word[0] = {};
    transport.recv(0, word, soon());
    EXPECT_EQ(word[0], std::byte(rail));
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
}

TEST(Rails, WhomOneOfThemWaitsForIsNoted) {
  TwoRanks ranks;
  std::atomic<bool> first_is_done = false;
  const auto errors = ranks.run([&](int rank, int rail, Transport& transport) {
    const Deadline deadline = soon();
    const auto noted = [&] { return first_is_done && ranks.transport(0).waits_for() == 1; };
    while (rank == 1 && rail == 2 && !noted() && !deadline.expired()) std::this_thread::yield();
    EXPECT_FALSE(deadline.expired());
    send_and_receive(transport);
    if (rank == 0 && rail == 0) {
      transport.note_wait(-1);  // its own wait is over
      first_is_done = true;
    }
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
  EXPECT_EQ(ranks.transport(0).waits_for(), -1);
}

TEST(Rails, OneThatFailsEndsAll) {
  for (int bad = 0; bad < TwoRanks::kRails; ++bad) {
    TwoRanks ranks;
    const auto start = Deadline::Clock::now();
    const auto errors = ranks.run([&](int rank, int rail, Transport& transport) {
      if (rank == 1 && rail == bad) throw Error(ErrorCode::kIo, "the rail has gone", 1);
      std::array<std::byte, 4> never{};
      transport.recv(1 - rank, never, soon());
    });
    EXPECT_LT(Deadline::Clock::now() - start, 1s + kSlack) << "rail " << bad;
    for (const auto& error : errors) {
      ASSERT_TRUE(error) << "rail " << bad;
      EXPECT_EQ(error->code(), ErrorCode::kIo) << error->what();
      EXPECT_EQ(error->rank(), 1);
      EXPECT_THAT(error->what(), testing::HasSubstr("the rail has gone"));
    }
  }
}

}  // namespace
}  // namespace lockstep::rails_test
