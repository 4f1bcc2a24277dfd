#include "lockstep/train/checkpoint/checkpoint_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <latch>

#include "lockstep/base/error.h"
#include "lockstep/train/checkpoint/checkpoint_keeper.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/training_states.h"

namespace lockstep::checkpoint_writer_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

TEST(CheckpointWriter, WritesBehindItsOwner) {
  std::latch go(1);
  std::vector<std::int64_t> written;
  {
    CheckpointWriter writer(some_state(0), [&](const TrainingState& state) -> std::uint64_t {
      go.wait();
      written.push_back(state.run.step);
      if (state.run.step == 2) throw Error(ErrorCode::kIo, "the disk is full");
      return 99;
    });
    EXPECT_FALSE(writer.take_outcome());
    writer.wait(soon());
    writer.snapshot().run.step = 1;
    writer.start();  // returns although nothing can be written yet
    EXPECT_FALSE(writer.take_outcome());
    EXPECT_THROW(writer.wait(Deadline::after(std::chrono::milliseconds(1))), Error);
    go.count_down();
    writer.wait(soon());
    auto outcome = writer.take_outcome();
    ASSERT_TRUE(outcome);
    EXPECT_EQ(outcome->step, 1);
    EXPECT_EQ(outcome->bytes, 99u);
    EXPECT_EQ(outcome->error, "");
    EXPECT_FALSE(writer.take_outcome());
    writer.snapshot().run.step = 2;
    writer.start();
    writer.wait(soon());
    EXPECT_THAT(writer.take_outcome()->error, HasSubstr("the disk is full"));
    writer.snapshot().run.step = 3;
    writer.start();
  }  // waits for the third
  EXPECT_THAT(written, ElementsAre(1, 2, 3));
}

class Keeper : public ::testing::Test {
 protected:
  CheckpointPolicy policy(std::int64_t save_every, std::int64_t last_step) {
    return {.out = out_.path(), .save_every = save_every, .keep_last = 2, .last_step = last_step};
  }
  // The state of a run that gets `step` for its numbers.
  static CheckpointKeeper::Snapshot copy_of(std::int64_t step) {
    return [step](TrainingState& snapshot) {
      const TrainingState now = some_state(step);
      std::ranges::copy(now.parameters.span(), snapshot.parameters.data());
      std::ranges::copy(now.first_moment.span(), snapshot.first_moment.data());
      std::ranges::copy(now.second_moment.span(), snapshot.second_moment.data());
    };
  }
  TemporaryFolder out_;
};

TEST_F(Keeper, SavesWhenDueAndKeepsTheLast) {
  CheckpointKeeper keeper(policy(2, 7), some_state(0).run, byte_tokenizer());
  for (std::int64_t step = 1; step <= 7; ++step) {
    keeper.after_step(step, false, copy_of(step), soon());
    keeper.finish(soon());  // so that none is skipped
  }
  EXPECT_EQ(keeper.phase(), CheckpointPhase::kTraining);
  EXPECT_THAT(list_checkpoints(out_.path()), ElementsAre(7, 6));
  EXPECT_TRUE(same_bits(load_newest_checkpoint(out_.path())->state, some_state(7)));
}

TEST_F(Keeper, ZeroIsNever) {
  CheckpointKeeper keeper(policy(0, 3), some_state(0).run, nullptr);
  for (std::int64_t step = 1; step <= 3; ++step) {
    keeper.after_step(step, step == 3, copy_of(step), soon());
  }
  keeper.finish(soon());
  EXPECT_THAT(list_checkpoints(out_.path()), IsEmpty());
}

TEST_F(Keeper, AStopSavesOnceWhereverItIs) {
  CheckpointKeeper keeper(policy(10, 100), some_state(0).run, byte_tokenizer());
  keeper.after_step(3, true, copy_of(3), soon());
  keeper.after_step(3, true, copy_of(3), soon());
  keeper.finish(soon());
  EXPECT_THAT(list_checkpoints(out_.path()), ElementsAre(3));
  EXPECT_FALSE(std::filesystem::exists(out_.path() + "/checkpoint-3.damaged"));
  EXPECT_FALSE(keeper.due(3, true));
}

TEST_F(Keeper, ASaveDuringAWriteIsSkippedAndTheFinalOneWaits) {
  CheckpointKeeper keeper(policy(1, 3), some_state(0).run, byte_tokenizer());
  ASSERT_TRUE(keeper.begin(1, false, soon()));
  EXPECT_FALSE(keeper.begin(2, false, soon()));  // the first has not even been copied
  EXPECT_EQ(keeper.phase(), CheckpointPhase::kSaveRequested);
  keeper.worker_ready(0);
  keeper.write(copy_of(1));
  keeper.after_step(3, false, copy_of(3), soon());
  keeper.finish(soon());
  EXPECT_THAT(list_checkpoints(out_.path()), ElementsAre(3, 1));
  EXPECT_TRUE(same_bits(load_checkpoint(out_.path() + "/checkpoint-1"), some_state(1)));
}

TEST_F(Keeper, AFailureIsToldAndTheNextSaveTriesAgain) {
  const std::string out = out_.path() + "/out";
  CheckpointPolicy policy = this->policy(1, 3);
  policy.out = out;  // is not there yet
  CheckpointKeeper keeper(policy, some_state(0).run, byte_tokenizer());
  keeper.after_step(1, false, copy_of(1), soon());
  try {
    keeper.finish(soon());
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.what(), HasSubstr("checkpoint-1.tmp: No such file"));
  }
  std::filesystem::create_directory(out);
  keeper.after_step(2, false, copy_of(2), soon());
  keeper.finish(soon());
  EXPECT_THAT(list_checkpoints(out), ElementsAre(2));
}

TEST_F(Keeper, ANewRunDoesNotTouchAnOldOnesCheckpoints) {
  EXPECT_FALSE(find_resume_point(out_.path(), false));
  EXPECT_FALSE(find_resume_point(out_.path(), true));
  EXPECT_FALSE(find_resume_point("", false));
  EXPECT_THROW(find_resume_point("", true), Error);
  save_checkpoint(out_.path(), some_state(8));
  try {
    find_resume_point(out_.path(), false);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("up to checkpoint-8: --resume goes on"));
  }
  EXPECT_EQ(find_resume_point(out_.path(), true)->state.run.step, 8);
}

}  // namespace
}  // namespace lockstep::checkpoint_writer_test
