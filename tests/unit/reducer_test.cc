#include "lockstep/train/reducer.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/base/index.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/transport/local_group.h"
#include "lockstep/model/update.h"
#include "tests/support/ranks.h"

namespace lockstep::reducer_test {
namespace {

constexpr std::size_t kSize = 5 * kNormBlock + 100;

struct Told {
  std::vector<Range> ranges;
  bool final = true;  // whether every element was the sum when it was told of
};

// One step of `ranks` ranks, each of which brings the number of its rank plus one everywhere.
std::vector<Told> run_step(int ranks, const ReducerOptions& options) {
  auto group = make_local_group(ranks);
  std::vector<Told> told(static_cast<std::size_t>(ranks));
  const auto errors = test::run_ranks(ranks, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    Communicator communicator(std::make_unique<PlanEngine>(std::move(group[index])),
                              std::chrono::seconds(20));
    std::vector<float> gradient(kSize, static_cast<float>(rank + 1));
    const auto sum = static_cast<float>(ranks * (ranks + 1) / 2);
    GradientReducer reducer(communicator, even_owners(static_cast<std::size_t>(ranks), ranks),
                            {gradient}, options, [&](Range range) {
                              told[index].ranges.push_back(range);
                              for (std::size_t i = range.begin; i < range.end; ++i) {
                                if (gradient[i] != sum) told[index].final = false;
                              }
                            });
    reducer.begin(1);
    for (std::size_t at = 0; at < kSize; at += 1000) {
      reducer.ready({at, std::min(kSize, at + 1000)});
    }
    const std::vector<std::vector<double>> tail{{1.0}};
    EXPECT_EQ(reducer.finish(tail).tail[0], ranks);
    communicator.barrier();
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
  return told;
}

TEST(Reducer, TellsOfBucketsInOrderWhenTheirSumIsThere) {
  ReducerOptions options;
  options.bucket_bytes = kNormBlock * sizeof(float);
  for (const bool overlap : {true, false}) {
    options.overlap = overlap;
    for (const Told& told : run_step(3, options)) {
      EXPECT_TRUE(told.final);
      ASSERT_EQ(told.ranges.size(), 6U);
      std::size_t end = 0;
      for (const Range range : told.ranges) {
        EXPECT_EQ(range.begin, end);
        end = range.end;
      }
      EXPECT_EQ(end, kSize);
    }
  }
}

// Rounded sums are widened at the end.
TEST(Reducer, TellsOfRoundedSumsAtOnce) {
  ReducerOptions options;
  options.wire = DataType::kBf16;
  for (const Told& told : run_step(2, options)) {
    EXPECT_TRUE(told.final);
    EXPECT_EQ(told.ranges, (std::vector<Range>{{0, kSize}}));
  }
}

// What is there already, or never comes here, is not told of.
TEST(Reducer, IsSilentWhereNothingTravels) {
  EXPECT_TRUE(run_step(1, {}).front().ranges.empty());
  ReducerOptions options;
  options.on_device = true;
  for (const Told& told : run_step(2, options)) EXPECT_TRUE(told.ranges.empty());
}

TEST(Buddies, ArePairsAndThreeAtTheEnd) {
  const auto of = [](int world_size) {
    std::vector<Range> all;
    for (int rank = 0; rank < world_size; ++rank) all.push_back(buddies_of(rank, world_size));
    return all;
  };
  EXPECT_EQ(of(1), (std::vector<Range>{{0, 1}}));
  EXPECT_EQ(of(2), (std::vector<Range>{{0, 2}, {0, 2}}));
  EXPECT_EQ(of(3), (std::vector<Range>{{0, 3}, {0, 3}, {0, 3}}));
  EXPECT_EQ(of(4), (std::vector<Range>{{0, 2}, {0, 2}, {2, 4}, {2, 4}}));
  EXPECT_EQ(of(5), (std::vector<Range>{{0, 2}, {0, 2}, {2, 5}, {2, 5}, {2, 5}}));
  EXPECT_EQ(group_range(kSize, 3, 5).begin, shard_range(kSize, 2, 5).begin);
  EXPECT_EQ(group_range(kSize, 3, 5).end, kSize);
  EXPECT_EQ(group_range(kSize, 0, 5), (Range{0, shard_range(kSize, 1, 5).end}));
}

// A number for every lane and element; sums of them are exact, in bf16 too.
float number_of(std::size_t lane, std::size_t element) {
  return static_cast<float>((lane + 1) * (element % 2 + 1));
}

// Lanes are dealt so that ranks have several partials. Some of the seven ranks have empty shards.
TEST(Buddies, HaveEachOthersSums) {
  constexpr std::size_t kLanes = 14;
  for (const int ranks : {1, 2, 3, 4, 5, 7}) {
    for (const bool buddy : {true, false}) {
      for (const bool overlap : {true, false}) {
        for (const DataType wire : {DataType::kF32, DataType::kBf16}) {
          SCOPED_TRACE(testing::Message() << ranks << " ranks, buddy " << buddy << ", overlap "
                                          << overlap << ", bf16 " << (wire == DataType::kBf16));
          ReducerOptions options;
          options.shard = true;
          options.buddy = buddy;
          options.overlap = overlap;
          options.wire = wire;
          options.bucket_bytes = kNormBlock * sizeof(float);
          LeafOwners owners;
          for (std::size_t lane = 0; lane < kLanes; ++lane) {
            owners.push_back(static_cast<int>(lane % index_of(ranks)));
          }
          auto group = make_local_group(ranks);
          const auto errors = test::run_ranks(ranks, [&](int rank) {
            Communicator communicator(
                std::make_unique<PlanEngine>(std::move(group[index_of(rank)])),
                std::chrono::seconds(20));
            std::vector<std::vector<float>> partials;
            std::vector<std::span<float>> spans;
            for (const Range node : owned_nodes(owners, rank)) {
              partials.emplace_back(kSize);
              for (std::size_t i = 0; i < kSize; ++i) {
                for (std::size_t lane = node.begin; lane < node.end; ++lane) {
                  partials.back()[i] += number_of(lane, i);
                }
              }
            }
            for (std::vector<float>& partial : partials) spans.emplace_back(partial);
            const Range held =
                buddy ? group_range(kSize, rank, ranks) : shard_range(kSize, rank, ranks);
            const auto sum_of = [&](std::size_t i) {
              return number_of(0, i) * static_cast<float>(kLanes * (kLanes + 1) / 2);
            };
            const auto expect_sums = [&](Range range) {
              for (std::size_t i = range.begin; i < range.end; ++i) {
                ASSERT_EQ(partials[0][i], sum_of(i)) << "rank " << rank << ", element " << i;
              }
            };
            std::size_t told = 0;
            GradientReducer reducer(communicator, owners, spans, options, [&](Range range) {
              EXPECT_EQ(range.begin, told);
              told = range.end;
              expect_sums(common_part(held, range));
            });
            EXPECT_EQ(reducer.held(), held);
            EXPECT_EQ(reducer.shard(), shard_range(kSize, rank, ranks));
            reducer.begin(1);
            reducer.ready({0, kSize / 2});
            const std::vector<std::vector<double>> tails(
                static_cast<std::size_t>(std::ranges::count(owners, rank)), {1.0});
            const ReducedStep step = reducer.finish(tails);
            EXPECT_EQ(step.range, reducer.shard());
            EXPECT_EQ(step.tail[0], static_cast<double>(kLanes));
            expect_sums(held);
            if (travels(options, ranks)) {
              EXPECT_EQ(told, kSize);
            }

            // What a rank alone knows of its own shard.
            std::vector<float> values(held.size(), -1.0F);
            for (std::size_t i = reducer.shard().begin; i < reducer.shard().end; ++i) {
              values[i - held.begin] = static_cast<float>(i);
            }
            reducer.complete_held(values);
            for (std::size_t i = held.begin; i < held.end; ++i) {
              ASSERT_EQ(values[i - held.begin], static_cast<float>(i));
            }
            communicator.barrier();
          });
          for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
        }
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::reducer_test
