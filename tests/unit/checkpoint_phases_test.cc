#include "lockstep/train/checkpoint/checkpoint_phases.h"

#include <gtest/gtest.h>

namespace lockstep::checkpoint_phases_test {
namespace {

TEST(CheckpointPhases, OneSaveFromBeginningToEnd) {
  CheckpointPhases phases(3);
  EXPECT_EQ(phases.phase(), CheckpointPhase::kTraining);
  EXPECT_TRUE(phases.request_save(100));
  EXPECT_EQ(phases.phase(), CheckpointPhase::kSaveRequested);
  EXPECT_EQ(phases.checkpoint_step(), 100);
  EXPECT_FALSE(phases.request_save(101));
  EXPECT_EQ(phases.checkpoint_step(), 100);
  EXPECT_FALSE(phases.worker_ready(0, 100));
  EXPECT_FALSE(phases.worker_ready(2, 100));
  EXPECT_TRUE(phases.worker_ready(1, 100));
  EXPECT_EQ(phases.phase(), CheckpointPhase::kWeightsSynced);
  EXPECT_TRUE(phases.start_writing());
  EXPECT_EQ(phases.phase(), CheckpointPhase::kWriting);
  EXPECT_FALSE(phases.request_save(200));
  EXPECT_TRUE(phases.complete());
  EXPECT_EQ(phases.phase(), CheckpointPhase::kComplete);
  EXPECT_FALSE(phases.request_save(200));
  phases.resume_training();
  EXPECT_EQ(phases.phase(), CheckpointPhase::kTraining);
  EXPECT_TRUE(phases.request_save(200));
}

TEST(CheckpointPhases, AnAcknowledgementCountsOncePerRankAndForItsStep) {
  CheckpointPhases phases(2);
  EXPECT_FALSE(phases.worker_ready(0, 5));  // nobody asked
  ASSERT_TRUE(phases.request_save(5));
  EXPECT_FALSE(phases.worker_ready(0, 5));
  EXPECT_FALSE(phases.worker_ready(0, 5));
  EXPECT_FALSE(phases.worker_ready(1, 4));  // a late one, of another step
  EXPECT_FALSE(phases.worker_ready(2, 5));  // there is no such rank
  EXPECT_EQ(phases.phase(), CheckpointPhase::kSaveRequested);
  EXPECT_TRUE(phases.worker_ready(1, 5));
  EXPECT_FALSE(phases.worker_ready(1, 5));
  phases.resume_training();
  ASSERT_TRUE(phases.request_save(6));  // all begin anew
  EXPECT_FALSE(phases.worker_ready(1, 6));
  EXPECT_TRUE(phases.worker_ready(0, 6));
}

TEST(CheckpointPhases, NothingHappensOutOfItsPhase) {
  CheckpointPhases phases(1);
  EXPECT_FALSE(phases.start_writing());
  EXPECT_FALSE(phases.complete());
  ASSERT_TRUE(phases.request_save(1));
  EXPECT_FALSE(phases.start_writing());
  EXPECT_FALSE(phases.complete());
  EXPECT_EQ(phases.phase(), CheckpointPhase::kSaveRequested);
  EXPECT_TRUE(phases.worker_ready(0, 1));
  EXPECT_FALSE(phases.complete());
  ASSERT_TRUE(phases.start_writing());
  EXPECT_FALSE(phases.start_writing());
  phases.resume_training();  // the write failed
  EXPECT_EQ(to_string(phases.phase()), "training");
}

TEST(CheckpointPhases, WeightConsistency) {
  const Blake3Hash hash = blake3({});
  Blake3Hash other = hash;
  other[31] ^= std::byte{1};
  EXPECT_TRUE(verify_weight_consistency(hash, {hash, hash, hash}));
  EXPECT_FALSE(verify_weight_consistency(hash, {hash, other, hash}));
}

}  // namespace
}  // namespace lockstep::checkpoint_phases_test
