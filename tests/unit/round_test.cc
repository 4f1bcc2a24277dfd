#include "lockstep/server/round.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/ranks.h"

namespace lockstep::round_test {
namespace {

using ::testing::HasSubstr;
using namespace test;

BulkHead vector_head(std::uint64_t step, std::uint64_t count) {
  BulkHead head;
  head.tag = WireTag::kGradientPayload;
  head.step = step;
  head.count = count;
  return head;
}

BulkHead block_head(std::uint32_t block, std::uint32_t num_blocks, std::vector<std::uint32_t> sizes,
                    std::uint64_t count) {
  BulkHead head;
  head.tag = WireTag::kBlockGradientPayload;
  head.step = 7;
  head.block_idx = block;
  head.num_blocks = num_blocks;
  head.component_sizes = std::move(sizes);
  head.count = count;
  return head;
}

AverageRound vector_round(Average average = Average::kWeighted) {
  return AverageRound({RoundKind::kVector, 7, {}, 0}, average, {"worker 0 (a)", "worker 1 (b)"});
}
AverageRound block_round(std::optional<std::uint32_t> block = {}) {
  return AverageRound({RoundKind::kBlock, 7, block, 0}, Average::kWeighted,
                      {"worker 0 (a)", "worker 1 (b)"});
}

void advance(AverageRound& round, std::vector<std::vector<float>> inputs) {
  std::vector<const std::byte*> pointers;
  for (auto& each : inputs) pointers.push_back(reinterpret_cast<std::byte*>(each.data()));
  round.advance(pointers, inputs[0].size());
}

TEST(AverageRound, WeighsAVectorByItsTotalsAndSumsThemUp) {
  AverageRound round = vector_round();
  std::vector<float> out(2);
  round.begin(1, vector_head(7, 2));
  EXPECT_TRUE(round.waits_for_totals(1));
  round.set_output(out.data());
  round.set_totals(1, 2.0F, 5, 30);
  EXPECT_FALSE(round.ready());
  round.begin(0, vector_head(7, 2));
  round.set_totals(0, 1.0F, 4, 10);
  ASSERT_TRUE(round.ready());
  advance(round, {{4}, {8}});
  advance(round, {{0}, {4}});
  round.end(0, {1.0F, 4, 10, {}});
  EXPECT_FALSE(round.complete());
  round.end(1, {2.0F, 5, 30, {}});
  ASSERT_TRUE(round.complete());
  EXPECT_EQ(out, (std::vector<float>{7, 3}));
  const RoundResult result = round.result();
  EXPECT_EQ(result.loss, 1.75F);
  EXPECT_EQ(result.correct, 9U);
  EXPECT_EQ(result.total, 40U);
  EXPECT_EQ(result.workers, (std::vector<WorkerTotals>{{1.0F, 4, 10}, {2.0F, 5, 30}}));
}

TEST(AverageRound, MeanNeedsNoWeights) {
  AverageRound round = vector_round(Average::kMean);
  std::vector<float> out(1);
  round.set_output(out.data());
  for (const int worker : {0, 1}) round.begin(worker, vector_head(7, 1));
  ASSERT_TRUE(round.ready());
  advance(round, {{4}, {8}});
  round.end(0, {0, 0, 0, {}});
  round.end(1, {3, 0, 0, {}});
  EXPECT_EQ(out[0], 6);
  EXPECT_EQ(round.result().loss, 0);  // nobody has a sample
}

// Whatever vectors get: blocks carry no counts.
TEST(AverageRound, OfBlocksTheMeanIsTaken) {
  AverageRound round = block_round();
  std::vector<float> out(3);
  round.set_output(out.data());
  for (const int worker : {0, 1}) round.begin(worker, block_head(4, 5, {1, 2}, 3));
  ASSERT_TRUE(round.ready());
  advance(round, {{3, 0, 6}, {6, 3, 0}});
  for (const int worker : {0, 1}) round.end(worker, {});
  EXPECT_EQ(out, (std::vector<float>{4.5F, 1.5F, 3}));
  EXPECT_EQ(round.result().key.block, 4U);
  EXPECT_EQ(round.result().num_blocks, 5U);
  EXPECT_EQ(round.result().component_sizes, (std::vector<std::uint32_t>{1, 2}));
}

// The first worker has begun; the second one's head is wrong.
Error second_fails(AverageRound round, const BulkHead& first, const BulkHead& second) {
  round.begin(0, first);
  Error error = error_of([&] { round.begin(1, second); });
  EXPECT_EQ(error.rank(), 1);
  EXPECT_THAT(error.what(), HasSubstr("worker 1 (b)"));
  return error;
}

TEST(AverageRound, MismatchesNameTheWorkerAndBothValues) {
  Error error = second_fails(vector_round(), vector_head(7, 5), vector_head(8, 5));
  EXPECT_EQ(error.code(), ErrorCode::kStepMismatch);
  EXPECT_THAT(error.what(), HasSubstr("of step 9; step 8 is expected"));

  error = second_fails(vector_round(), vector_head(7, 5), vector_head(7, 6));
  EXPECT_EQ(error.code(), ErrorCode::kSizeMismatch);
  EXPECT_THAT(error.what(), HasSubstr("sent 6 elements for the gradient vector of step 8, but "
                                      "worker 0 (a) sent 5"));

  error = second_fails(vector_round(), vector_head(7, 5), block_head(0, 1, {5}, 5));
  EXPECT_EQ(error.code(), ErrorCode::kUnexpectedMessage);
  EXPECT_THAT(error.what(),
              HasSubstr("sent a BlockGradientPayload; a GradientPayload is expected"));

  const auto block = block_head(2, 3, {2, 3}, 5);
  error = second_fails(block_round(), block, block_head(1, 3, {2, 3}, 5));
  EXPECT_EQ(error.code(), ErrorCode::kBlockMismatch);
  EXPECT_THAT(error.what(), HasSubstr("sent block 1 of step 8; block 2 is expected"));

  error = second_fails(block_round(2), block, block_head(2, 4, {2, 3}, 5));
  EXPECT_EQ(error.code(), ErrorCode::kBlockMismatch);
  EXPECT_THAT(error.what(), HasSubstr("has 4 blocks, but worker 0 (a) has 3"));

  error = second_fails(block_round(), block, block_head(2, 3, {3, 2}, 5));
  EXPECT_EQ(error.code(), ErrorCode::kComponentMismatch);
  EXPECT_THAT(error.what(), HasSubstr("2 sizes: 3 2"));

  error = second_fails(block_round(), block, block_head(2, 3, {2, 2}, 5));
  EXPECT_EQ(error.code(), ErrorCode::kSizeMismatch);
  EXPECT_THAT(error.what(), HasSubstr("add up to 4"));
}

TEST(AverageRound, ComponentsAreCompared) {
  AverageRound round({RoundKind::kComponent, 7, {}, 2}, Average::kMean, {"a"});
  BulkHead head;
  head.tag = WireTag::kNonBlockGradientPayload;
  head.step = 7;
  head.component = 1;
  const Error error = error_of([&] { round.begin(0, head); });
  EXPECT_EQ(error.code(), ErrorCode::kComponentMismatch);
  EXPECT_THAT(error.what(),
              HasSubstr("component 1 (final_norm) of step 8; component 2 (embedding)"));
}

TEST(AverageRound, ANonFiniteElementIsNamedToTheLastDetail) {
  AverageRound round = block_round();
  std::vector<float> out(6);
  round.set_output(out.data());
  for (const int worker : {0, 1}) round.begin(worker, block_head(4, 5, {2, 4}, 6));
  advance(round, {{0, 0}, {0, 0}});
  const Error error = error_of([&] { advance(round, {{0, 0, 0}, {0, 0, -INFINITY}}); });
  EXPECT_EQ(error.code(), ErrorCode::kNonFinite);
  EXPECT_EQ(error.rank(), 1);
  EXPECT_THAT(error.what(), HasSubstr("worker 1 (b) sent -inf for block 4 of step 8: element 4 "
                                      "(component 1 of the block, element 2 of it)"));
}

TEST(AverageRound, ANonFiniteLossHalts) {
  AverageRound round = vector_round();
  round.begin(0, vector_head(7, 1));
  const Error error = error_of([&] { round.set_totals(0, NAN, 0, 1); });
  EXPECT_EQ(error.code(), ErrorCode::kNonFinite);
}

TEST(AverageRound, TheFootMustBeWhatWasAnnounced) {
  AverageRound round = vector_round();
  float out = 0;
  round.set_output(&out);
  for (const int worker : {0, 1}) {
    round.begin(worker, vector_head(7, 1));
    round.set_totals(worker, 1, 1, 1);
  }
  advance(round, {{1}, {1}});
  const Error error = error_of([&] { round.end(0, {1, 1, 2, {}}); });
  EXPECT_EQ(error.code(), ErrorCode::kSizeMismatch);
}

}  // namespace
}  // namespace lockstep::round_test
