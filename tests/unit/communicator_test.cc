#include "lockstep/comm/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/transport/local_group.h"
#include "tests/support/groups.h"
#include "tests/support/ranks.h"

namespace lockstep::communicator_test {
namespace {

using test::error_of;
using ::testing::HasSubstr;

TEST(Communicator, CheckThrowsTheCauseOnEveryRankOnceTheJobHasFailed) {
  test::Group group({.world_size = 2, .faults = {}});
  EXPECT_NO_THROW(group[0].check());
  group[1].abort("enough");
  for (const int rank : {0, 1}) {
    const Error error = error_of([&] { group[rank].check(); });
    EXPECT_EQ(error.code(), ErrorCode::kAborted);
    EXPECT_EQ(error.rank(), 1);
    EXPECT_THAT(error.what(), HasSubstr("enough"));
  }
}

TEST(Communicator, AReportedFailureEndsTheJobUnlessItHasFailedBefore) {
  test::Group group({.world_size = 2, .faults = {}});
  const Error first(ErrorCode::kIo, "the card is broken", 1);
  EXPECT_EQ(error_of([&] { group[1].fail(first); }).code(), ErrorCode::kIo);
  const Error later(ErrorCode::kTimeout, "nothing came", 0);
  for (const Error& error :
       {error_of([&] { group[0].check(); }), error_of([&] { group[0].fail(later); }),
        error_of([&] { group[0].barrier(); })}) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.what(), HasSubstr("the card is broken"));
  }
}

// Ranks that are threads store their results in each other's memory, which a rank frees, or uses
// for something else, as soon as it has thrown.
TEST(Communicator, NobodyTouchesTheMemoryOfAThreadThatHasLeftAFailedCollective) {
  constexpr int kRanks = 4;
  constexpr std::size_t kCount = 1 << 17;
  constexpr float kMine = -1;
  for (int turn = 0; turn < 12; ++turn) {
    auto transports = make_local_group(kRanks);
    std::vector<std::unique_ptr<Communicator>> group;
    for (auto& transport : transports) {
      group.push_back(std::make_unique<Communicator>(
          std::make_unique<PlanEngine>(std::move(transport)), std::chrono::seconds(20)));
    }
    std::vector<std::vector<float>> data(kRanks, std::vector<float>(kCount, 1));
    std::atomic<int> done = 0;
    std::thread other([&] {  // in the middle of one
      while (done < 4 * kRanks + turn % kRanks) std::this_thread::yield();
      group[0]->abort("enough");
    });
    const auto errors = test::run_ranks(kRanks, [&](int rank) {
      const auto index = static_cast<std::size_t>(rank);
      try {
        for (;; ++done) group[index]->all_reduce(std::span(data[index]), ReduceOp::kMax);
      } catch (const Error&) {
        std::ranges::fill(data[index], kMine);
        throw;
      }
    });
    other.join();
    for (const auto& error : errors) {
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), ErrorCode::kAborted);
    }
    for (const std::vector<float>& own : data) {
      EXPECT_EQ(std::ranges::count(own, kMine), static_cast<std::ptrdiff_t>(kCount));
    }
  }
}

TEST(Communicator, AThreadThatRunsOutOfMemoryTellsAllRanksSo) {
  test::GroupOptions options{
      .medium = test::GroupMedium::kLocalMessages, .world_size = 2, .faults = {{}, {}}};
  options.faults[1].exhaust_at = 0;
  test::Group group(options);
  std::vector<float> values[2] = {std::vector<float>(1000), std::vector<float>(1000)};
  Work works[2];
  for (const int rank : {0, 1}) {
    works[rank] = group[rank].start(calls::all_reduce(std::span(values[rank]), ReduceOp::kSum));
  }
  for (Work& work : works) {
    const Error error = error_of([&] { work.wait(Deadline::after(std::chrono::seconds(30))); });
    EXPECT_THAT(error.what(), HasSubstr("the communication thread failed: std::bad_alloc"));
  }
}

}  // namespace
}  // namespace lockstep::communicator_test
