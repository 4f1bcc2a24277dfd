#include "lockstep/train/replica.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/model/cpu/adamw.h"
#include "tests/support/trainers.h"

namespace lockstep::replica_test {
namespace {

constexpr std::uint64_t kRows = 4;

TrainerOptions two_lanes() {
  TrainerOptions options = test::small_training();
  options.global_batch = 2 * kRows;
  options.micro_batch = kRows;
  return options;
}

struct TestBatch {
  TestBatch() {
    const Samples samples = test::some_samples(kRows);
    for (std::uint64_t row = 0; row < kRows; ++row) {
      samples.read(row, std::span(tokens).subspan(row * test::kContext, test::kContext),
                   std::span(targets).subspan(row * test::kContext, test::kContext));
    }
  }
  Batch batch() const { return {tokens, targets, kRows, test::kContext}; }

  std::vector<std::int32_t> tokens = std::vector<std::int32_t>(kRows * test::kContext);
  std::vector<std::int32_t> targets = tokens;
};

class CpuReplicas : public ::testing::Test {
 protected:
  test::SoloTrainer worker_{two_lanes(), test::some_samples(64), test::some_samples(8), 1};
  Replica& replica_ = *worker_.replica;
  TestBatch data_;
  UpdateRequest request_{.tokens = 100, .clip = 0.5, .learning_rate = 1e-2, .step = 0};
};

TEST_F(CpuReplicas, TellOfLanesInOrder) {
  replica_.skip(0, {});
  replica_.gradient(data_.batch(), 1, {});
  const std::vector<LaneResult> lanes = replica_.finish_lanes();
  ASSERT_EQ(lanes.size(), 2U);
  EXPECT_EQ(lanes[0].sum.tokens, 0);
  EXPECT_EQ(lanes[1].sum.tokens, static_cast<std::int64_t>(kRows) * test::kContext);
  EXPECT_TRUE(replica_.finish_lanes().empty());
}

TEST_F(CpuReplicas, TakeTheNormThemselvesOrAreGivenIt) {
  test::SoloTrainer other(two_lanes(), test::some_samples(64), test::some_samples(8), 1);
  for (Replica* replica : {&replica_, other.replica.get()}) {
    replica->gradient(data_.batch(), 0, {});
    replica->gradient(data_.batch(), 1, {});
  }
  std::vector<double> squares(norm_blocks(replica_.layout().size()));
  replica_.block_squares({0, replica_.layout().size()}, squares);
  replica_.update(request_);
  request_.norm = std::sqrt(tree_sum(squares));
  other.replica->update(request_);
  EXPECT_TRUE(replica_.finish_update().done);
  EXPECT_EQ(replica_.finish_update().norm, *request_.norm);
  EXPECT_EQ(other.replica->finish_update().norm, *request_.norm);
  EXPECT_EQ(worker_.parameters(), other.parameters());
}

// So that an update can be asked for before anybody has looked.
TEST_F(CpuReplicas, ChangeNothingUnlessAllIsFinite) {
  const std::vector<float> good = worker_.parameters();
  replica_.gradient(data_.batch(), 0, {});
  replica_.gradient(data_.batch(), 1, {});
  request_.norm = std::numeric_limits<double>::infinity();
  replica_.update(request_);
  EXPECT_FALSE(replica_.finish_update().done);
  request_.norm.reset();
  request_.tokens = 0;  // every lane left out
  replica_.update(request_);
  EXPECT_FALSE(replica_.finish_update().done);
  EXPECT_EQ(worker_.parameters(), good);
  replica_.finish_lanes();

  // A loss that is not finite is enough, whatever the norm.
  std::vector<float> bad = good;
  bad[0] = std::numeric_limits<float>::quiet_NaN();
  replica_.set_parameters(bad);
  replica_.gradient(data_.batch(), 0, {});
  request_.tokens = 100;
  request_.norm = 1.0;
  replica_.update(request_);
  EXPECT_FALSE(replica_.finish_update().done);
  EXPECT_EQ(std::memcmp(worker_.parameters().data(), bad.data(), bad.size() * sizeof(float)), 0);
  EXPECT_FALSE(std::isfinite(replica_.finish_lanes().front().sum.loss));

  replica_.set_parameters(good);
  replica_.gradient(data_.batch(), 0, {});
  request_.norm.reset();
  replica_.update(request_);
  EXPECT_TRUE(replica_.finish_update().done);
  EXPECT_NE(worker_.parameters(), good);
}

}  // namespace
}  // namespace lockstep::replica_test
