#include "lockstep/train/outside_average.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>

#include "lockstep/run/original_star.h"
#include "tests/support/pretended_gpu.h"
#include "tests/support/star.h"
#include "tests/support/trainers.h"

namespace lockstep::outside_average_test {
namespace {

using namespace test;
using ::testing::HasSubstr;

const GpuParts kPretended = pretended_parts();

TrainerOptions four_lanes() {
  TrainerOptions options = small_training();
  options.global_batch = 8;
  options.micro_batch = 2;
  options.schedule.steps = 8;
  options.clip = 0;
  return options;
}

struct Trained {
  std::string hash;
  std::vector<double> losses;
  std::vector<float> parameters;
  RunEnd end{};
};

Trained train(const TrainerOptions& options, const GpuParts* gpu = nullptr) {
  TestWorker worker(options, some_samples(40), some_samples(5), 1,
                    std::move(make_local_group(1)[0]), gpu);
  worker.trainer.start();
  Trained result;
  result.end =
      worker.trainer.run([] { return Requests{}; },
                         [&](const StepReport& report) { result.losses.push_back(report.loss); });
  result.hash = worker.trainer.verify();
  result.parameters = worker.parameters();
  return result;
}

struct ByHand final : OutsideAverage {
  std::optional<Range> next_share() override { return share(); }
  std::optional<Averaged> average(std::span<float> mean, const LossSum& own) override {
    if (sums.size() == ends_in) return std::nullopt;
    sums.push_back(own);
    return Averaged{averaged ? averaged(mean) : std::nullopt};
  }

  std::function<std::optional<Range>()> share = [] { return Range{0, 8}; };
  std::function<std::optional<double>(std::span<float> mean)> averaged;
  std::vector<LossSum> sums;
  std::size_t ends_in = SIZE_MAX;  // the step after so many
};

// The mean of one worker is its sum times the factor that it would get anyway.
TEST(OutsideAverage, NobodyElseChangesNoBit) {
  const Trained plain = train(four_lanes());
  for (const GpuParts* gpu : {static_cast<const GpuParts*>(nullptr), &kPretended}) {
    ByHand nobody;
    TrainerOptions options = four_lanes();
    options.outside = &nobody;
    const Trained outside = train(options, gpu);
    EXPECT_EQ(outside.hash, plain.hash) << (gpu != nullptr);
    EXPECT_EQ(outside.losses, plain.losses);
    ASSERT_EQ(nobody.sums.size(), 8U);
    EXPECT_EQ(nobody.sums[0].tokens, 8 * kContext);
    EXPECT_GE(nobody.sums.back().correct, nobody.sums.front().correct);
  }
}

TEST(OutsideAverage, WhatComesBackIsWhatCounts) {
  const Trained plain = train(four_lanes());
  for (const GpuParts* gpu : {static_cast<const GpuParts*>(nullptr), &kPretended}) {
    ByHand others;
    others.averaged = [](std::span<float> mean) {
      for (float& value : mean) value = -value;
      return 42.0;
    };
    TrainerOptions options = four_lanes();
    options.outside = &others;
    const Trained outside = train(options, gpu);
    EXPECT_NE(outside.hash, plain.hash);
    EXPECT_EQ(outside.losses, std::vector<double>(8, 42.0));
    // It has unlearned.
    EXPECT_GT(others.sums.back().loss, others.sums.front().loss);
  }
}

TEST(OutsideAverage, SharesAreOfAnySizeAndTheirEndEndsTheRun) {
  const std::vector<Range> shares = {{0, 8}, {3, 8}, {0, 0}, {7, 8}, {0, 1}};
  std::size_t next = 0;
  ByHand others;
  others.share = [&]() -> std::optional<Range> {
    if (next == shares.size()) return std::nullopt;
    return shares[next++];
  };
  std::vector<bool> zeros;
  others.averaged = [&](std::span<float> mean) {
    zeros.push_back(std::ranges::all_of(mean, [](float value) { return value == 0; }));
    return std::nullopt;
  };
  TrainerOptions options = four_lanes();
  options.outside = &others;
  const Trained outside = train(options);
  EXPECT_EQ(outside.end, RunEnd::kOutside);
  ASSERT_EQ(others.sums.size(), shares.size());
  for (std::size_t i = 0; i < shares.size(); ++i) {
    EXPECT_EQ(others.sums[i].tokens, static_cast<std::int64_t>(shares[i].size()) * kContext) << i;
  }
  EXPECT_EQ(zeros, (std::vector<bool>{false, false, true, false, false}));
}

TEST(OutsideAverage, AnEndInsteadOfAnAverageLeavesTheStepsBefore) {
  for (const GpuParts* gpu : {static_cast<const GpuParts*>(nullptr), &kPretended}) {
    const auto ended_in = [&](std::size_t steps) {
      ByHand others;
      others.ends_in = steps;
      TrainerOptions options = four_lanes();
      options.outside = &others;
      return train(options, gpu);
    };
    const Trained all = ended_in(SIZE_MAX), three = ended_in(3);
    EXPECT_EQ(all.end, RunEnd::kDone);
    EXPECT_EQ(three.end, RunEnd::kOutside);
    EXPECT_EQ(three.losses, std::vector(all.losses.begin(), all.losses.begin() + 3));
    // As if nobody had begun another step.
    ByHand others;
    int left = 3;
    others.share = [&] { return left-- > 0 ? std::optional(Range{0, 8}) : std::nullopt; };
    TrainerOptions options = four_lanes();
    options.outside = &others;
    EXPECT_EQ(train(options, gpu).hash, three.hash);
  }
}

// A share is computed from the same samples as the lanes that it takes the place of.
TEST(OutsideAverage, AShareHasTheSamplesOfItsLanes) {
  const LanePlan plan{.samples = 40, .seed = 11, .global_batch = 8, .micro_batch = 2};
  std::vector<std::uint64_t> lane(2), share(5);
  plan.samples_from(3, 3, share);
  plan.sample_ids(3, 2, lane);
  EXPECT_EQ(lane, (std::vector<std::uint64_t>{share[1], share[2]}));
}

// Two workers, one of them on a GPU, at a gradient server that speaks the original protocol.
struct Star2 {
  std::vector<Trained> run(Mode mode, const TrainerOptions& options) {
    ServerOptions how = server_options(2);
    how.settings.total_samples = options.global_batch;
    Star star(how);
    std::vector<Trained> trained(2);
    const auto steps = static_cast<std::uint64_t>(options.schedule.steps);
    const auto errors = star.run(
        2,
        [&](GradientServer& server) {
          for (std::uint64_t step = 0; step < steps; ++step) {
            if (mode == Mode::kVector) {
              server.send_shards(step);
              const RoundResult result = server.reduce({RoundKind::kVector, step, {}, 0});
              EXPECT_EQ(result.total, options.global_batch * kContext);
              EXPECT_LE(result.correct, result.total);
              EXPECT_EQ(result.workers.size(), 2U);
              server.broadcast(result);
              continue;
            }
            ASSERT_TRUE(server.await_step(step));
            for (const std::uint32_t block : {1, 0}) {
              server.broadcast(server.reduce({RoundKind::kBlock, step, block, 0}));
            }
            for (std::uint8_t i = 0; i < kComponents; ++i) {
              server.broadcast(server.reduce({RoundKind::kComponent, step, {}, i}));
            }
          }
          server.shutdown();
        },
        [&](int i) {
          OriginalStar outside(star.worker(), mode, options);
          EXPECT_EQ(outside.total_workers(), 2);
          TrainerOptions own = options;
          own.outside = &outside;
          trained[static_cast<std::size_t>(i)] = train(own, i == 0 ? nullptr : &kPretended);
        });
    expect_no_errors(errors);
    return trained;
  }
};

TEST(OriginalStar, ReplicasStayEqualAndFollowTheRunOverLanes) {
  const Trained lanes = train(four_lanes());
  for (const Mode mode : {Mode::kBlocks, Mode::kVector}) {
    const std::vector<Trained> workers = Star2().run(mode, four_lanes());
    EXPECT_EQ(workers[0].hash, workers[1].hash) << to_string(mode);
    EXPECT_EQ(Star2().run(mode, four_lanes())[0].hash, workers[0].hash);
    // Every worker has the same number of tokens, so the mean of means is the mean, but for
    // rounding.
    ASSERT_EQ(workers[0].losses.size(), lanes.losses.size());
    for (std::size_t i = 0; i < lanes.losses.size(); ++i) {
      const double loss = mode == Mode::kVector ? workers[0].losses[i]
                                                : (workers[0].losses[i] + workers[1].losses[i]) / 2;
      EXPECT_NEAR(loss, lanes.losses[i], 1e-3) << to_string(mode) << " step " << i;
    }
    for (std::size_t i = 0; i < lanes.parameters.size(); ++i) {
      ASSERT_NEAR(workers[0].parameters[i], lanes.parameters[i], 5e-3);
    }
  }
}

TEST(OriginalStar, AModelThatTheProtocolCannotCarryIsRefusedBeforeJoining) {
  TrainerOptions options = four_lanes();
  options.model.hidden = 512;
  options.model.heads = options.model.kv_heads = 8;
  options.model.vocab = 50257;
  const Error error = error_of([&] { OriginalStar(WorkerOptions{}, Mode::kBlocks, options); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.what(), HasSubstr("NonBlockGradientPayload of 102926358 bytes"));
  EXPECT_THAT(error.what(), HasSubstr("100000000 at most"));
}

TEST(OriginalStar, SamplesThatAStepDoesNotHaveAreRefused) {
  ServerOptions how = server_options(1);
  how.settings.total_samples = 9;
  Star star(how);
  const auto errors = star.run(
      1, [&](GradientServer& server) { server.send_shards(0), server.drain(); },
      [&](int) {
        OriginalStar outside(star.worker(), Mode::kVector, four_lanes());
        const Error error = error_of([&] { outside.next_share(); });
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
        EXPECT_THAT(error.what(), HasSubstr("[0, 9) of a step, but a step has 8"));
        EXPECT_THAT(error.what(), HasSubstr("--total-samples 8"));
      });
  expect_no_errors(errors);
}

}  // namespace
}  // namespace lockstep::outside_average_test
