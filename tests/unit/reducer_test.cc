#include "lockstep/train/reducer.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace lockstep::reducer_test
