// Injected faults at every operation of a small collective.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/build_kind.h"
#include "tests/support/groups.h"

namespace lockstep::test::faults_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

constexpr int kRanks = 3;
constexpr std::size_t kMostOperations = 200;

struct Ended {
  std::vector<std::optional<Error>> errors;
  bool failed() const { return errors[0] || errors[1] || errors[2]; }
};

// An all-reduce with a fault at one rank; checks the result where there is one.
Ended run_with(int rank, const LocalFaults& faults, Algorithm algorithm,
               std::chrono::nanoseconds deadline) {
  GroupOptions options;
  options.medium = GroupMedium::kLocalMessages;
  options.world_size = kRanks;
  if (algorithm == Algorithm::kTwoLevel) {
    options.medium = GroupMedium::kLocal;
    options.hosts = {0, 0, 1};
  }
  options.faults.resize(kRanks);
  options.faults[static_cast<std::size_t>(rank)] = faults;
  Group group(options);
  Ended run;
  run.errors = group.errors([&](Communicator& comm) {
    std::vector<std::int32_t> data(3000, comm.rank() + 1);
    CallOptions call;
    call.algorithm = algorithm;
    call.deadline = Deadline::after(deadline);
    comm.all_reduce(std::span(data), ReduceOp::kSum, call);
    EXPECT_EQ(data, std::vector<std::int32_t>(3000, 6));
  });
  return run;
}

class Faults : public testing::TestWithParam<Algorithm> {};

TEST_P(Faults, AFailureReachesAllRanksWithItsCause) {
  std::size_t fired = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (std::size_t at = 0; at < kMostOperations; ++at) {
      SCOPED_TRACE(testing::Message() << "rank " << rank << ", operation " << at);
      LocalFaults faults;
      faults.fail_at = at;
      const Ended run = run_with(rank, faults, GetParam(), 30s);
      if (!run.failed()) break;
      ++fired;
      ASSERT_LT(at + 1, kMostOperations);
      // A rank whose part was done already succeeded.
      ASSERT_TRUE(run.errors[static_cast<std::size_t>(rank)]);
      for (const auto& error : run.errors) {
        if (!error) continue;
        EXPECT_EQ(error->code(), ErrorCode::kIo) << error->what();
        EXPECT_THAT(error->what(), HasSubstr("injected failure"));
        EXPECT_STREQ(error->what(), run.errors[static_cast<std::size_t>(rank)]->what());
      }
    }
  }
  EXPECT_GE(fired, 2U * kRanks);
}

TEST_P(Faults, WhatIsLostIsMissedInTime) {
  const auto patience = kSanitizers.empty() ? 150ms : 1000ms;
  std::size_t fired = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (std::size_t at = 0; at < kMostOperations; at += 3) {
      SCOPED_TRACE(testing::Message() << "rank " << rank << ", operation " << at);
      LocalFaults faults;
      faults.drop_at = at;
      const auto start = Deadline::Clock::now();
      const Ended run = run_with(rank, faults, GetParam(), patience);
      EXPECT_LT(Deadline::Clock::now() - start, patience + kSlack);
      if (!run.failed()) break;
      ++fired;
      for (const auto& error : run.errors) {
        if (!error) continue;
        EXPECT_EQ(error->code(), ErrorCode::kTimeout) << error->what();
      }
    }
  }
  EXPECT_GE(fired, std::size_t{kRanks});
}

TEST_P(Faults, ADelayChangesNothing) {
  for (int rank = 0; rank < kRanks; ++rank) {
    for (const std::size_t at : {0, 1, 2, 3, 5, 8}) {
      LocalFaults faults;
      faults.delay_at = at;
      faults.delay = 20ms;
      EXPECT_FALSE(run_with(rank, faults, GetParam(), 30s).failed());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Local, Faults,
                         testing::Values(Algorithm::kPair, Algorithm::kRing, Algorithm::kTree,
                                         Algorithm::kHalvingDoubling, Algorithm::kDirect,
                                         Algorithm::kTwoLevel),
                         [](const auto& algorithm) {
                           std::string name(to_string(algorithm.param));
                           std::erase(name, '-');
                           return name;
                         });

}  // namespace
}  // namespace lockstep::test::faults_test
