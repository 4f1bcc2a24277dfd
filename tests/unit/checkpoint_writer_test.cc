#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <latch>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/checkpoint/writer.h"
#include "tests/support/error_text.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/training_states.h"

namespace lockstep::checkpoint_writer_test {
namespace {

using test::io_error_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

// The state of a run that gets `step` for its numbers.
CheckpointWriter::Snapshot copy_of(std::int64_t step) {
  return [step](TrainingState& snapshot) {
    const TrainingState now = some_state(step);
    std::ranges::copy(now.parameters.span(), snapshot.parameters.data());
    std::ranges::copy(now.first_moment.span(), snapshot.first_moment.data());
    std::ranges::copy(now.second_moment.span(), snapshot.second_moment.data());
  };
}

void save(CheckpointWriter& writer, std::int64_t step, bool wait = false) {
  ASSERT_TRUE(writer.request_save(step, wait, soon()));
  writer.write(copy_of(step));
}

TEST(CheckpointWriter, OneSaveFromBeginningToEnd) {
  std::latch go(1);
  CheckpointWriter writer(some_state(0), [&](const TrainingState&) -> std::uint64_t {
    go.wait();
    return 99;
  });
  EXPECT_EQ(writer.phase(), CheckpointPhase::kTraining);
  EXPECT_TRUE(writer.request_save(100, false, soon()));
  EXPECT_EQ(writer.phase(), CheckpointPhase::kSaveRequested);
  EXPECT_FALSE(writer.request_save(101, false, soon()));
  EXPECT_EQ(writer.phase(), CheckpointPhase::kSaveRequested);
  writer.write([&](TrainingState& snapshot) {
    EXPECT_EQ(snapshot.run.step, 100);
    EXPECT_EQ(writer.phase(), CheckpointPhase::kWeightsSynced);
  });
  EXPECT_EQ(writer.phase(), CheckpointPhase::kWriting);
  EXPECT_FALSE(writer.request_save(200, false, soon()));
  EXPECT_EQ(writer.phase(), CheckpointPhase::kWriting);
  go.count_down();
  while (writer.phase() == CheckpointPhase::kWriting) std::this_thread::yield();
  EXPECT_EQ(writer.phase(), CheckpointPhase::kComplete);
  writer.finish(soon());
  EXPECT_EQ(writer.phase(), CheckpointPhase::kTraining);
  EXPECT_TRUE(writer.request_save(200, false, soon()));
}

TEST(CheckpointWriter, NothingHappensOutOfItsPhase) {
  const CheckpointWriter::Save fails = [](const TrainingState&) -> std::uint64_t {
    throw Error(ErrorCode::kIo, "the disk is full");
  };
  EXPECT_DEATH(CheckpointWriter(some_state(0), fails).write(copy_of(1)), "kSaveRequested");
  CheckpointWriter writer(some_state(0), fails);
  writer.finish(soon());  // nothing to wait for
  EXPECT_EQ(writer.phase(), CheckpointPhase::kTraining);
  ASSERT_TRUE(writer.request_save(1, false, soon()));
  writer.finish(soon());
  EXPECT_EQ(writer.phase(), CheckpointPhase::kSaveRequested);
  writer.write(copy_of(1));
  EXPECT_THAT(io_error_of([&] { writer.finish(soon()); }), HasSubstr("the disk is full"));
  EXPECT_EQ(to_string(writer.phase()), "training");  // the save is given up
}

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
    writer.finish(soon());
    save(writer, 1);  // returns although nothing can be written yet
    EXPECT_EQ(writer.phase(), CheckpointPhase::kWriting);
    EXPECT_THROW(writer.finish(Deadline::after(std::chrono::milliseconds(1))), Error);
    go.count_down();
    writer.finish(soon());
    save(writer, 2);
    EXPECT_THAT(io_error_of([&] { writer.finish(soon()); }), HasSubstr("the disk is full"));
    save(writer, 3);
  }  // waits for the third
  EXPECT_THAT(written, ElementsAre(1, 2, 3));
}

TEST(CheckpointWriter, ASaveDuringAWriteIsSkippedAndTheFinalOneWaits) {
  TemporaryFolder out;
  std::latch go(1);
  CheckpointWriter writer(some_state(0), [&](const TrainingState& state) {
    go.wait();
    return save_checkpoint(out.path(), state);
  });
  ASSERT_TRUE(writer.request_save(1, false, soon()));
  EXPECT_FALSE(writer.request_save(2, false, soon()));  // the first has not even been copied
  EXPECT_EQ(writer.phase(), CheckpointPhase::kSaveRequested);
  writer.write(copy_of(1));
  EXPECT_FALSE(writer.request_save(2, false, soon()));
  EXPECT_THROW((void)writer.request_save(3, true, Deadline::after(std::chrono::milliseconds(1))),
               Error);
  go.count_down();
  save(writer, 3, /*wait=*/true);
  writer.finish(soon());
  EXPECT_THAT(list_checkpoints(out.path()), ElementsAre(3, 1));
  EXPECT_TRUE(same_bits(load_checkpoint(out.path() + "/checkpoint-1"), some_state(1)));
}

TEST(CheckpointWriter, AFailureIsToldAndTheNextSaveTriesAgain) {
  TemporaryFolder folder;
  const std::string out = folder.path() + "/out";  // is not there yet
  CheckpointWriter writer(some_state(0),
                          [&](const TrainingState& state) { return save_checkpoint(out, state); });
  save(writer, 1);
  EXPECT_THAT(io_error_of([&] { writer.finish(soon()); }), HasSubstr("/out: No such file"));
  std::filesystem::create_directory(out);
  save(writer, 2);
  writer.finish(soon());
  EXPECT_THAT(list_checkpoints(out), ElementsAre(2));
}

}  // namespace
}  // namespace lockstep::checkpoint_writer_test
