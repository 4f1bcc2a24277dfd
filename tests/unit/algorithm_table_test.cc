#include "lockstep/comm/collectives/algorithm_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/comm/call.h"

namespace lockstep::algorithm_table_test {
namespace {

constexpr Algorithm kAll[] = {
    Algorithm::kAuto,   Algorithm::kPair, Algorithm::kRing,   Algorithm::kHalvingDoubling,
    Algorithm::kDirect, Algorithm::kTree, Algorithm::kShared, Algorithm::kTwoLevel,
    Algorithm::kNative};
constexpr Sharing kSharings[] = {Sharing::kNone, Sharing::kHosts, Sharing::kAll};
constexpr Collective kCollectives[] = {
    Collective::kBarrier,     Collective::kAllReduce,         Collective::kReduceScatter,
    Collective::kReduce,      Collective::kAllGather,         Collective::kBroadcast,
    Collective::kGather,      Collective::kScatter,           Collective::kAllToAll,
    Collective::kReduceNodes, Collective::kReduceScatterNodes};

Call call_of(Collective collective, std::size_t count, Algorithm algorithm) {
  Call call;
  call.collective = collective;
  call.total = count;
  call.options.algorithm = algorithm;
  return call;
}

TEST(AlgorithmTable, ChoosesWhatIsOffered) {
  for (const Collective collective : kCollectives) {
    for (const Sharing sharing : kSharings) {
      for (const int world_size : {2, 3, 8, 9, 64}) {
        for (const std::size_t count : {0, 1, 1000, 100'000, 100'000'000}) {
          for (const bool crowded : {false, true}) {
            const Call call = call_of(collective, count, Algorithm::kAuto);
            const Algorithm chosen = choose_algorithm(call, world_size, sharing, crowded);
            EXPECT_NE(chosen, Algorithm::kAuto);
            EXPECT_NE(chosen, Algorithm::kRing) << "the default is exact";
            EXPECT_TRUE(offers(collective, chosen, sharing)) << to_string(collective);
          }
        }
      }
    }
  }
}

TEST(AlgorithmTable, TakesTheCallersChoiceOrRefusesIt) {
  for (const Collective collective : kCollectives) {
    for (const Algorithm algorithm : kAll) {
      if (algorithm == Algorithm::kAuto) continue;
      for (const Sharing sharing : kSharings) {
        const Call call = call_of(collective, 1000, algorithm);
        if (offers(collective, algorithm, sharing)) {
          EXPECT_EQ(choose_algorithm(call, 4, sharing, false), algorithm);
          continue;
        }
        try {
          choose_algorithm(call, 4, sharing, false);
          ADD_FAILURE() << to_string(collective) << " " << to_string(algorithm);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
          EXPECT_THAT(error.what(), testing::HasSubstr(std::string(to_string(algorithm))));
        }
      }
    }
  }
}

TEST(AlgorithmTable, RanksThatShareCoresSendFewMessages) {
  const Call small = call_of(Collective::kAllReduce, 100, Algorithm::kAuto);
  for (const int world_size : {3, 4, 8}) {
    EXPECT_EQ(choose_algorithm(small, world_size, Sharing::kNone, false), Algorithm::kPair);
    EXPECT_EQ(choose_algorithm(small, world_size, Sharing::kNone, true), Algorithm::kTree);
  }
  EXPECT_EQ(choose_algorithm(small, 2, Sharing::kNone, true), Algorithm::kPair);
}

TEST(AlgorithmTable, SharedMemoryIsUsedWhereItIs) {
  const Call call = call_of(Collective::kAllReduce, 1000, Algorithm::kAuto);
  EXPECT_EQ(choose_algorithm(call, 4, Sharing::kAll, false), Algorithm::kShared);
  EXPECT_NE(choose_algorithm(call, 4, Sharing::kNone, false), Algorithm::kShared);
  EXPECT_FALSE(offers(Collective::kAllReduce, Algorithm::kShared, Sharing::kNone));
  EXPECT_FALSE(offers(Collective::kAllReduce, Algorithm::kShared, Sharing::kHosts));
}

TEST(AlgorithmTable, LargeMessagesTakeTwoLevelsWhereSomeRanksShareAHost) {
  for (const Collective collective :
       {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather,
        Collective::kBroadcast, Collective::kReduceNodes, Collective::kReduceScatterNodes}) {
    const Call large = call_of(collective, std::size_t{25} << 20, Algorithm::kAuto);
    EXPECT_EQ(choose_algorithm(large, 4, Sharing::kHosts, false), Algorithm::kTwoLevel);
    EXPECT_NE(choose_algorithm(large, 4, Sharing::kNone, false), Algorithm::kTwoLevel);
    EXPECT_NE(choose_algorithm(large, 4, Sharing::kAll, false), Algorithm::kTwoLevel);
    const Call small = call_of(collective, 1000, Algorithm::kAuto);
    EXPECT_NE(choose_algorithm(small, 4, Sharing::kHosts, false), Algorithm::kTwoLevel);
  }
}

TEST(AlgorithmTable, SumsOverTooManyNodesForTheBoardsGoByMessages) {
  Call call = call_of(Collective::kReduceNodes, 1000, Algorithm::kAuto);
  call.owners = even_owners(100'000, 2);  // few nodes, for all their lanes
  EXPECT_EQ(choose_algorithm(call, 2, Sharing::kAll, false), Algorithm::kShared);
  for (std::size_t lane = 0; lane < call.owners.size(); ++lane) {
    call.owners[lane] = static_cast<int>(lane % 2);
  }
  EXPECT_EQ(choose_algorithm(call, 2, Sharing::kAll, false), Algorithm::kDirect);
  EXPECT_EQ(choose_algorithm(call, 2, Sharing::kHosts, false), Algorithm::kDirect);
  call.options.algorithm = Algorithm::kShared;
  EXPECT_THROW(choose_algorithm(call, 2, Sharing::kAll, false), Error);
  call.options.algorithm = Algorithm::kTwoLevel;
  EXPECT_THROW(choose_algorithm(call, 2, Sharing::kHosts, false), Error);
}

}  // namespace
}  // namespace lockstep::algorithm_table_test
