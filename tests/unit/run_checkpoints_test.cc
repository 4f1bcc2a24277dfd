#include "lockstep/train/run_checkpoints.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <filesystem>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/resume.h"
#include "tests/support/ranks.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/trainers.h"
#include "tests/support/training_states.h"

namespace lockstep::run_checkpoints_test {
namespace {

using ::lockstep::test::run_ranks;
using ::lockstep::test::small_training;
using ::lockstep::test::SoloTrainer;
using ::lockstep::test::some_samples;
using ::lockstep::test::TestWorker;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TrainerOptions small_options(bool shard = false) {
  TrainerOptions options = small_training();
  options.global_batch = 10;
  options.micro_batch = 2;  // five lanes
  options.schedule.steps = 9;
  options.skip_lanes = {{2, 1}, {7, 3}};
  options.reducer.shard = shard;
  return options;
}

// Trains in `out` from wherever it stands until step `until`, then stops as a signal would make it.
// Returns the errors of the ranks; all must have the same weights, whose hash `hash` gets.
std::vector<std::optional<Error>> train(const TrainerOptions& options, const std::string& out,
                                        int workers, std::int64_t until, std::string& hash,
                                        int flip_rank = -1) {
  auto group = make_local_group(workers);
  return run_ranks(workers, [&](int rank) {
    TestWorker worker(options, some_samples(60), some_samples(9), 1,
                      std::move(group[index_of(rank)]));
    ResumePoint resume = find_resume_point(worker.communicator, out, FolderUse::kResume);
    if (resume.run) restore(worker.trainer, resume);
    worker.trainer.start();
    RunCheckpoints checkpoints(worker.trainer,
                               {.out = out,
                                .save_every = 4,
                                .keep_last = 0,
                                .wait = true,
                                .last_step = options.schedule.steps},
                               nullptr);
    worker.trainer.run(
        [&] {
          return Requests{worker.trainer.steps_done() + 1 == until ? 15 : 0, false};
        },
        [&](const StepReport& report) {
          if (rank == flip_rank && report.step == 3) {
            worker.replica->complete_parameters([](std::span<float> values) { values[0] += 1; });
          }
          checkpoints.after_step({.stopping = report.stop != 0});
        });
    checkpoints.finish(false);
    const std::string own = worker.trainer.verify();
    if (rank == 0) hash = own;
    worker.communicator.barrier();
  });
}

std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void expect_same_files(const std::string& a, const std::string& b) {
  for (const auto& entry : std::filesystem::directory_iterator(a)) {
    EXPECT_EQ(contents(entry.path()), contents(b / entry.path().filename())) << entry.path();
  }
}

void expect_none(const std::vector<std::optional<Error>>& errors) {
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
}

TEST(RunCheckpoints, FilesDoNotDependOnTheWorkers) {
  TemporaryFolder alone;
  std::string expected;
  expect_none(train(small_options(), alone.path(), 1, 0, expected));
  EXPECT_THAT(list_checkpoints(alone.path()), ElementsAre(9, 8, 4));
  for (const auto& [workers, shard] : {std::pair(2, true), {3, false}, {5, true}}) {
    SCOPED_TRACE(fmt::format("{} workers, sharded {}", workers, shard));
    TemporaryFolder out;
    std::string hash;
    expect_none(train(small_options(shard), out.path(), workers, 0, hash));
    EXPECT_EQ(hash, expected);
    for (const char* name : {"checkpoint-4", "checkpoint-8", "checkpoint-9"}) {
      expect_same_files(alone.path() + "/" + name, out.path() + "/" + name);
    }
  }
}

TEST(RunCheckpoints, GoesOnWithAnyNumberOfWorkers) {
  TemporaryFolder alone;
  TemporaryFolder out;
  std::string expected;
  expect_none(train(small_options(), alone.path(), 1, 0, expected));
  std::string hash;
  std::int64_t until = 1;
  for (const int workers : {2, 1, 4, 3}) {
    expect_none(train(small_options(workers % 3 != 0), out.path(), workers, until, hash));
    EXPECT_EQ(list_checkpoints(out.path()).front(), until);
    until += 2;
  }
  expect_none(train(small_options(true), out.path(), 2, 0, hash));
  EXPECT_EQ(hash, expected);
  expect_same_files(alone.path() + "/checkpoint-9", out.path() + "/checkpoint-9");
}

TEST(RunCheckpoints, AReplicaThatDiffersHaltsBeforeAnythingIsWritten) {
  TemporaryFolder out;
  std::string hash;
  TrainerOptions options = small_options();
  options.verify_every = 0;
  for (const auto& error : train(options, out.path(), 3, 0, hash, 2)) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kReplicaMismatch);
    EXPECT_EQ(error->rank(), 2);
    EXPECT_THAT(error->what(), HasSubstr("the first tensor that differs is "));
  }
  EXPECT_TRUE(std::filesystem::is_empty(out.path()));
}

TEST(RunCheckpoints, WhatRankZeroFindsWrongAllAreTold) {
  TemporaryFolder out;
  std::string hash;
  expect_none(train(small_options(), out.path(), 1, 4, hash));
  TrainerOptions other = small_options();
  other.seed = 12;
  for (const auto& error : train(other, out.path(), 2, 0, hash)) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error->what(), HasSubstr("seed is 12, and was 11"));
  }
  std::filesystem::remove(out.path() + "/checkpoint-4/model.safetensors");
  for (const auto& error : train(small_options(), out.path(), 2, 0, hash)) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kIo);
    EXPECT_THAT(error->what(), HasSubstr("none of its 1 checkpoints is intact"));
  }
}

TEST(RunCheckpoints, ResidualsComeBackToTheSameWorkers) {
  TrainerOptions options = small_options();
  options.reducer.wire = DataType::kBf16;
  TemporaryFolder undisturbed;
  TemporaryFolder out;
  std::string expected;
  std::string hash;
  expect_none(train(options, undisturbed.path(), 2, 0, expected));
  expect_none(train(options, out.path(), 2, 5, hash));
  EXPECT_TRUE(std::filesystem::exists(out.path() + "/checkpoint-5/residual.safetensors"));
  expect_none(train(options, out.path(), 2, 0, hash));
  EXPECT_EQ(hash, expected);
  std::filesystem::remove_all(out.path() + "/checkpoint-9");
  expect_none(train(options, out.path(), 3, 0, hash));  // they begin at zero
}

// A run of one worker that pretends to have done its steps.
class OneWorker : public ::testing::Test {
 protected:
  CheckpointPolicy policy(std::int64_t save_every, std::int64_t last_step) {
    return {.out = out_.path(),
            .save_every = save_every,
            .keep_last = 2,
            .wait = true,
            .last_step = last_step};
  }
  void after_step(RunCheckpoints& checkpoints, std::int64_t step, bool stopping = false) {
    worker_.trainer.set_steps_done(step);
    checkpoints.after_step({.stopping = stopping});
  }

  TemporaryFolder out_;
  SoloTrainer worker_{small_options(), some_samples(60), some_samples(9), 1};
};
using RunCheckpointsOfOne = OneWorker;
using Resume = OneWorker;

TEST_F(RunCheckpointsOfOne, SavesWhenDueAndKeepsTheLast) {
  RunCheckpoints checkpoints(worker_.trainer, policy(2, 7), nullptr);
  for (std::int64_t step = 1; step <= 7; ++step) after_step(checkpoints, step);
  checkpoints.finish(false);
  EXPECT_EQ(checkpoints.phase(), CheckpointPhase::kTraining);
  EXPECT_THAT(list_checkpoints(out_.path()), ElementsAre(7, 6));
  const auto newest = load_newest_checkpoint(out_.path());
  const TrainingState& saved = newest->state;
  const std::vector<float> parameters = worker_.parameters();
  EXPECT_TRUE(std::ranges::equal(saved.parameters.span(), parameters));
  EXPECT_EQ(to_json(saved.run), to_json(run_state_of(worker_.trainer)));
}

TEST_F(RunCheckpointsOfOne, ZeroIsNeverUnlessTheRunIsStopped) {
  RunCheckpoints checkpoints(worker_.trainer, policy(0, 3), nullptr);
  for (std::int64_t step = 1; step <= 3; ++step) {
    worker_.trainer.set_steps_done(step);
    checkpoints.after_step({.best = true});
  }
  checkpoints.finish(false);
  EXPECT_THAT(list_checkpoints(out_.path()), IsEmpty());
  after_step(checkpoints, 2, true);
  checkpoints.finish(true);
  EXPECT_THAT(list_checkpoints(out_.path()), ElementsAre(2));
  EXPECT_TRUE(load_newest_checkpoint(out_.path())->damaged.empty());
}

TEST_F(RunCheckpointsOfOne, WithoutAFolderNothingIsSaved) {
  RunCheckpoints checkpoints(worker_.trainer, {.last_step = 3}, nullptr);
  worker_.trainer.set_steps_done(2);
  checkpoints.after_step({.stopping = true, .requested = true, .best = true});
  checkpoints.finish(true);
  EXPECT_EQ(checkpoints.phase(), CheckpointPhase::kTraining);
}

TEST_F(RunCheckpointsOfOne, ARankMayRequestASave) {
  std::vector<std::string> told;
  CheckpointPolicy policy = this->policy(0, 9);
  policy.saved = [&](const std::string& path) { told.push_back(path); };
  RunCheckpoints checkpoints(worker_.trainer, policy, nullptr);
  worker_.trainer.set_steps_done(4);
  checkpoints.after_step({.requested = true});
  checkpoints.finish(false);
  EXPECT_THAT(list_checkpoints(out_.path()), ElementsAre(4));
  EXPECT_THAT(told, ElementsAre(out_.path() + "/checkpoint-4"));
}

TEST_F(RunCheckpointsOfOne, ByTimeRankZeroRequestsThem) {
  using namespace std::chrono_literals;
  CheckpointPolicy policy = this->policy(0, 9);
  policy.interval = 1h;
  EXPECT_FALSE(RunCheckpoints(worker_.trainer, policy, nullptr).save_wanted());
  policy.interval = 1ns;
  RunCheckpoints checkpoints(worker_.trainer, policy, nullptr);
  EXPECT_TRUE(checkpoints.save_wanted());
  after_step(checkpoints, 8);
  EXPECT_THAT(list_checkpoints(out_.path()), IsEmpty());
  after_step(checkpoints, 9);  // the last step
  checkpoints.finish(false);
  EXPECT_THAT(list_checkpoints(out_.path()), ElementsAre(9));
}

TEST_F(RunCheckpointsOfOne, TheBestIsSavedAndStays) {
  CheckpointPolicy policy = this->policy(2, 9);
  policy.keep_last = 1;
  RunCheckpoints checkpoints(worker_.trainer, policy, nullptr);
  for (std::int64_t step = 1; step <= 9; ++step) {
    worker_.trainer.set_steps_done(step);
    const bool best = step == 1 || step == 3;
    if (best) worker_.trainer.set_validation({step, 1.0 / static_cast<double>(step), 0});
    checkpoints.after_step({.best = best});
  }
  checkpoints.finish(false);
  EXPECT_THAT(list_checkpoints(out_.path()), ElementsAre(9, 3));
  const RunState saved = load_newest_checkpoint(out_.path())->state.run;
  EXPECT_EQ(saved.validation, (ValidationRecord{3, 1.0 / 3, 0}));
}

TEST_F(RunCheckpointsOfOne, AStopSavesOnceWhereverItIs) {
  RunCheckpoints checkpoints(worker_.trainer, policy(10, 100), nullptr);
  after_step(checkpoints, 3, true);
  after_step(checkpoints, 3, true);
  checkpoints.finish(true);
  EXPECT_THAT(list_checkpoints(out_.path()), ElementsAre(3));
  EXPECT_FALSE(std::filesystem::exists(out_.path() + "/checkpoint-3.damaged"));
}

TEST_F(Resume, ANewRunDoesNotTouchAnOldOnesCheckpoints) {
  const auto find = [&](const std::string& out, FolderUse use) {
    return find_resume_point(worker_.communicator, out, use);
  };
  EXPECT_FALSE(find(out_.path(), FolderUse::kNew).run);
  EXPECT_FALSE(find(out_.path(), FolderUse::kResume).run);
  EXPECT_FALSE(find("", FolderUse::kNew).run);
  EXPECT_THROW(find("", FolderUse::kResume), Error);
  save_checkpoint(out_.path(), some_state(8));
  try {
    find(out_.path(), FolderUse::kNew);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("up to checkpoint-8: --resume goes on"));
  }
  const ResumePoint found = find(out_.path(), FolderUse::kResume);
  EXPECT_EQ(found.run->step, 8);
  EXPECT_EQ(found.tokenizer->kind(), TokenizerKind::kBytes);
}

TEST_F(Resume, AFolderThatIsNotFreeIsRefusedOrOverwritten) {
  const auto problem = [&](FolderUse use) -> std::string {
    try {
      find_resume_point(worker_.communicator, out_.path(), use);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "none";
  };
  const auto write = [&](const char* name) { std::ofstream(out_.path() + "/" + name) << "x"; };
  const auto there = [&](const char* name) {
    return std::filesystem::exists(out_.path() + "/" + name);
  };
  write("metrics.jsonl");
  write("halt.json");
  std::filesystem::create_directory(out_.path() + "/flight");
  write("flight/rank-0.json");
  EXPECT_EQ(problem(FolderUse::kNew), "none");  // a run that left nothing worth keeping
  write("model.safetensors");
  EXPECT_THAT(problem(FolderUse::kNew), HasSubstr("has a model already"));
  EXPECT_THAT(problem(FolderUse::kResume), HasSubstr("has a model, and no checkpoint"));
  write("run.json");
  EXPECT_THAT(problem(FolderUse::kResume), HasSubstr("is finished, and there is no checkpoint"));
  EXPECT_TRUE(there("model.safetensors"));
  save_checkpoint(out_.path(), some_state(8));
  write("letter.txt");
  EXPECT_EQ(problem(FolderUse::kOverwrite), "none");
  EXPECT_FALSE(there("model.safetensors") || there("metrics.jsonl") || there("checkpoint-8"));
  EXPECT_FALSE(there("flight"));
  EXPECT_TRUE(there("letter.txt"));
  EXPECT_THAT(problem(FolderUse::kNew), HasSubstr("has other files (letter.txt)"));
  EXPECT_THAT(problem(FolderUse::kResume), HasSubstr("has other files (letter.txt), and no run"));
  write("run.json");  // a run that was to write among them, and was lost before it saved
  EXPECT_EQ(problem(FolderUse::kResume), "none");
}

TEST_F(Resume, WhatARunThatFailedHasWrittenIsNoReasonToRefuse) {
  std::filesystem::create_directory(out_.path() + "/flight");
  const auto find = [&](FolderUse use) {
    return find_resume_point(worker_.communicator, out_.path(), use).run.has_value();
  };
  EXPECT_FALSE(find(FolderUse::kNew));
  EXPECT_FALSE(find(FolderUse::kResume));
}

TEST_F(Resume, ADryRunSaysThatTheFolderWouldBeRefusedAndMakesNone) {
  const std::string none = out_.path() + "/none";
  check_folder_is_free(worker_.communicator, none);
  EXPECT_FALSE(std::filesystem::exists(none));
  save_checkpoint(out_.path(), some_state(8));
  EXPECT_THROW(check_folder_is_free(worker_.communicator, out_.path()), Error);
}

TEST(RunCheckpoints, AllRanksHaveTheTokenizerOfTheCheckpoint) {
  TemporaryFolder out;
  save_checkpoint(out.path(), some_state(8));
  auto group = make_local_group(3);
  expect_none(run_ranks(3, [&](int rank) {
    Communicator communicator(std::make_unique<PlanEngine>(std::move(group[index_of(rank)])),
                              std::chrono::seconds(20));
    const ResumePoint point = find_resume_point(communicator, out.path(), FolderUse::kResume);
    ASSERT_TRUE(point.tokenizer);
    EXPECT_EQ(point.tokenizer->kind(), TokenizerKind::kBytes);
    communicator.barrier();
  }));
}

void damage(const std::string& checkpoint) {
  std::filesystem::resize_file(checkpoint + "/model.safetensors", 100);
}

// Any of them may be rank 0 in a later generation.
TEST(RunCheckpoints, AllRanksAreToldWhichCheckpointsAreDamaged) {
  TemporaryFolder out;
  for (const std::int64_t step : {7, 8, 9}) save_checkpoint(out.path(), some_state(step));
  for (const char* name : {"/checkpoint-8", "/checkpoint-9"}) damage(out.path() + name);
  auto group = make_local_group(2);
  expect_none(run_ranks(2, [&](int rank) {
    Communicator communicator(std::make_unique<PlanEngine>(std::move(group[index_of(rank)])),
                              std::chrono::seconds(20));
    EXPECT_THAT(find_resume_point(communicator, out.path(), FolderUse::kResume).damaged,
                ElementsAre(9, 8));
    const std::string own = rank == 0 ? "" : out.path();
    EXPECT_THAT(find_newest_checkpoint(communicator, own).damaged, ElementsAre(9, 8));
    communicator.barrier();
  }));
}

// A newcomer that becomes rank 0 removes no good checkpoint for a damaged one.
TEST(RunCheckpoints, ALaterRankZeroCountsNoDamagedCheckpoint) {
  TemporaryFolder out;
  for (const std::int64_t step : {2, 3}) save_checkpoint(out.path(), some_state(step));
  auto group = make_local_group(2);
  expect_none(run_ranks(2, [&](int rank) {
    TestWorker worker(small_options(), some_samples(60), some_samples(9), 1,
                      std::move(group[index_of(rank)]));
    RunCheckpoints checkpoints(worker.trainer,
                               {.out = out.path(), .save_every = 1, .keep_last = 2, .last_step = 9},
                               nullptr);
    if (rank == 1) checkpoints.spare(std::array<std::int64_t, 1>{3});
    checkpoints.regroup();
    worker.trainer.set_steps_done(6);
    checkpoints.after_step({});
    checkpoints.finish(false);
    worker.communicator.barrier();
  }));
  EXPECT_THAT(list_checkpoints(out.path()), ElementsAre(6, 3, 2));
}

// Nothing is written before every rank has shown that it has the weights of the step.
TEST(RunCheckpoints, ASaveWaitsForTheWeightsOfEveryRank) {
  TemporaryFolder out;
  auto group = make_local_group(3);
  std::array<std::optional<CheckpointPhase>, 3> phases;
  const auto errors = run_ranks(3, [&](int rank) {
    TestWorker worker(small_options(), some_samples(60), some_samples(9), 1,
                      std::move(group[index_of(rank)]));
    worker.trainer.set_steps_done(5);
    RunCheckpoints checkpoints(worker.trainer, {.out = out.path(), .save_every = 1, .last_step = 9},
                               nullptr);
    worker.trainer.set_steps_done(6);
    checkpoints.after_step({});
    checkpoints.finish(false);
    worker.communicator.barrier();
    EXPECT_TRUE(std::filesystem::exists(out.path() + "/checkpoint-6/manifest.json"));
    worker.trainer.set_steps_done(7);
    if (rank == 1) {
      worker.replica->complete_parameters([](std::span<float> values) { values[0] += 1; });
    }
    EXPECT_THROW(checkpoints.after_step({}), Error);
    phases[index_of(rank)] = checkpoints.phase();
  });
  expect_none(errors);
  EXPECT_THAT(phases, ElementsAre(CheckpointPhase::kSaveRequested, CheckpointPhase::kTraining,
                                  CheckpointPhase::kTraining));
  EXPECT_THAT(list_checkpoints(out.path()), ElementsAre(6));
}

TEST(RunCheckpoints, WeightConsistency) {
  const ParameterLayout layout(small_options().model);
  const std::vector<Blake3Hash> hashes(layout.tensors().size(), blake3({}));
  auto group = make_local_group(3);
  expect_none(run_ranks(3, [&](int rank) {
    Communicator communicator(std::make_unique<PlanEngine>(std::move(group[index_of(rank)])),
                              std::chrono::seconds(20));
    compare_replicas(communicator, layout, hashes, 1);
    std::vector<Blake3Hash> own = hashes;
    if (rank == 1) own[2][31] ^= std::byte{1};
    try {
      compare_replicas(communicator, layout, own, 1);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kReplicaMismatch);
      EXPECT_EQ(error.rank(), 1);
      EXPECT_THAT(error.what(), HasSubstr(layout.tensors()[2].name));
    }
  }));
}

}  // namespace
}  // namespace lockstep::run_checkpoints_test
