#include "lockstep/train/checkpoint/state_exchange.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "lockstep/base/error.h"
#include "tests/support/ranks.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/trainers.h"

namespace lockstep::state_exchange_test {
namespace {

using ::lockstep::test::run_ranks;
using ::lockstep::test::TestWorker;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kContext = 16;

Samples some_samples(std::uint64_t count) {
  std::vector<std::int32_t> tokens(count * kContext + 1);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::int32_t>((i * (i / 64 % 5 + 1)) % 48);
  }
  return Samples({TokenShard::of("tokens", tokens, {})}, 64, kContext);
}

TrainerOptions small_options(bool shard = false) {
  TrainerOptions options;
  options.model = {.vocab = 64,
                   .hidden = 32,
                   .layers = 2,
                   .heads = 4,
                   .kv_heads = 2,
                   .intermediate = 48,
                   .context = kContext};
  options.global_batch = 10;
  options.micro_batch = 2;  // five lanes
  options.schedule.peak = 1e-2;
  options.schedule.steps = 9;
  options.seed = 11;
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
                      std::move(group[static_cast<std::size_t>(rank)]));
    SharedResume resume = share_resume_point(worker.communicator, [&] {
      EXPECT_EQ(rank, 0);
      return find_resume_point(out, true);
    });
    RunState run = run_state_of(options, some_samples(60));
    if (resume.run) restore_state(worker.trainer, resume, run);
    run.step = worker.trainer.steps_done();
    worker.trainer.start();
    RunCheckpoints checkpoints(worker.trainer,
                               {.out = out,
                                .save_every = 4,
                                .keep_last = 0,
                                .wait = true,
                                .last_step = options.schedule.steps,
                                .world_size = static_cast<std::uint32_t>(workers)},
                               run, nullptr);
    worker.trainer.run(
        [&] {
          return Requests{worker.trainer.steps_done() + 1 == until ? 15 : 0, false};
        },
        [&](const StepReport& report) {
          if (rank == flip_rank && report.step == 3) {
            worker.replica->complete_parameters([](std::span<float> values) { values[0] += 1; });
          }
          checkpoints.after_step(report.stop != 0);
        });
    checkpoints.finish();
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

TEST(StateExchange, FilesDoNotDependOnTheWorkers) {
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

TEST(StateExchange, GoesOnWithAnyNumberOfWorkers) {
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

TEST(StateExchange, AReplicaThatDiffersHaltsBeforeAnythingIsWritten) {
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

TEST(StateExchange, WhatRankZeroFindsWrongAllAreTold) {
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

TEST(StateExchange, ResidualsComeBackToTheSameWorkers) {
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

}  // namespace
}  // namespace lockstep::state_exchange_test
