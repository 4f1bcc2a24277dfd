#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/transport/local_group.h"
#include "lockstep/lockstep.h"
#include "lockstep/run/job_state.h"

namespace lockstep::job_test {
namespace {

using testing::HasSubstr;

// What every rank's thread does with its job.
void run_ranks(int world_size, const std::function<void(Job&)>& body) {
  std::vector<Job> jobs = join_threads(world_size);
  std::vector<std::thread> threads;
  for (Job& job : jobs) threads.emplace_back([&body, &job] { body(job); });
  for (std::thread& thread : threads) thread.join();
}

// Something that a sum in another order would change.
void compute(std::uint32_t lane, std::span<float> gradient, std::span<double> numbers) {
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    EXPECT_EQ(gradient[i], 0.0F);
    gradient[i] += random_f32(1, lane, i);
  }
  EXPECT_EQ(numbers[0], 0.0);
  numbers[0] += lane;
  numbers[1] += 1;
}

TEST(Job, AloneWithoutAnEnvironment) {
  Job job = join();
  EXPECT_EQ(job.rank(), 0);
  EXPECT_EQ(job.world_size(), 1);
  EXPECT_EQ(job.generation(), 0u);
  std::vector<float> data = {1, 2};
  job.communicator().all_reduce(std::span(data), ReduceOp::kSum);
  EXPECT_EQ(data, (std::vector<float>{1, 2}));
  job.leave();
}

TEST(Job, AloneThereIsNobodyToRegroupWith) {
  Job job = join({.survive = true});
  EXPECT_THROW(job.regroup(1, Regroup::kInOrder), Error);
  EXPECT_EQ(job.rank(), 0);
}

TEST(Job, PlaceFromTheEnvironment) {
  ::setenv("RANK", "1", 1);
  ::setenv("WORLD_SIZE", "3", 1);
  ::setenv("MASTER_ADDR", "there", 1);
  ::setenv("MASTER_PORT", "29500", 1);
  ::setenv("LOCKSTEP_TOKEN", "secret", 1);
  JoinOptions given;
  given.name = "mine";
  const JoinOptions options = JoinOptions::from_environment(given);
  EXPECT_EQ(options.rank, 1);
  EXPECT_EQ(options.world_size, 3);
  EXPECT_EQ(options.master_host, "there");
  EXPECT_EQ(options.master_port, 29500);
  EXPECT_EQ(options.token, "secret");
  EXPECT_EQ(options.name, "mine");
  given.token = "other";
  EXPECT_EQ(JoinOptions::from_environment(given).token, "other");
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCKSTEP_TOKEN"}) {
    ::unsetenv(name);
  }
}

TEST(Job, SeveralRanksNeedAPlaceToMeet) {
  try {
    join({.rank = 0, .world_size = 2});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("MASTER_ADDR"));
  }
}

TEST(Job, Threads) {
  run_ranks(3, [](Job& job) {
    std::vector<std::int32_t> data = {job.rank()};
    job.communicator().all_reduce(std::span(data), ReduceOp::kSum);
    EXPECT_EQ(data[0], 3);
    job.leave();
  });
}

TEST(LaneSum, SameBitsForAnyNumberOfWorkers) {
  constexpr std::uint32_t kLanes = 7;
  constexpr std::size_t kElements = 1000;
  std::vector<float> alone;
  for (const int workers : {1, 2, 3, 7}) {
    run_ranks(workers, [&](Job& job) {
      LaneSum lanes(job, kLanes, kElements, 2);
      for (std::int64_t step = 1; step <= 2; ++step) {
        const LaneSum::Sum sum = lanes.sum(step, compute);
        EXPECT_EQ(sum.numbers, (std::vector<double>{21, 7}));
        const std::vector<float> gradient(sum.gradient.begin(), sum.gradient.end());
        if (workers == 1) alone = gradient;
        EXPECT_EQ(gradient, alone) << workers << " workers";
      }
      job.leave();
    });
  }
  EXPECT_FLOAT_EQ(alone[0], [] {
    double sum = 0;
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) sum += double{random_f32(1, lane, 0)};
    return static_cast<float>(sum);
  }());
}

TEST(LaneSum, InPiecesAsAWhole) {
  constexpr std::size_t kElements = 3000;
  for (const int workers : {1, 3}) {
    run_ranks(workers, [&](Job& job) {
      LaneSum whole(job, 7, kElements, 2);
      const LaneSum::Sum expected = whole.sum(1, compute);
      LaneSum pieces(job, 7, kElements, 2, 4096);
      EXPECT_THROW(pieces.ready(0, {0, 1}), Error);  // before begin()
      pieces.begin(1);
      const std::vector<std::uint32_t> lanes = pieces.own_lanes();
      for (std::size_t i = 0; i < lanes.size(); ++i) {
        EXPECT_THROW(pieces.finish(), Error);
        std::ranges::fill(pieces.lane_gradient(i), 0.0F);
        compute(lanes[i], pieces.lane_gradient(i), pieces.lane_numbers(i));
        EXPECT_THROW(pieces.ready(i, {1, 2}), Error);      // a gap
        EXPECT_THROW(pieces.ready(i + 1, {0, 1}), Error);  // another lane
        pieces.ready(i, {0, 1999});
        EXPECT_THROW(pieces.ready(i, {1999, kElements + 1}), Error);
        pieces.ready(i, {1999, kElements});
      }
      EXPECT_THROW(pieces.ready(lanes.size(), {0, 1}), Error);
      EXPECT_TRUE(pieces.wait_until(Deadline::after(std::chrono::seconds(30))));
      const LaneSum::Sum sum = pieces.finish();
      EXPECT_TRUE(std::ranges::equal(sum.gradient, expected.gradient));
      EXPECT_EQ(sum.numbers, expected.numbers);
      job.leave();
    });
  }
}

// Nothing of it has been sent: it can begin again.
TEST(LaneSum, AStepThatWasBrokenOff) {
  run_ranks(2, [](Job& job) {
    LaneSum lanes(job, 4, 100);
    const auto fails = [](std::uint32_t, std::span<float>, std::span<double>) {
      throw std::runtime_error("asked for");
    };
    EXPECT_THROW(lanes.sum(1, fails), std::runtime_error);
    const auto ones = [](std::uint32_t, std::span<float> gradient, std::span<double>) {
      std::ranges::fill(gradient, 1.0F);
    };
    EXPECT_EQ(lanes.sum(1, ones).gradient[99], 4.0F);
    job.leave();
  });
}

TEST(LaneSum, NeedsALaneForEveryWorker) {
  run_ranks(2, [](Job& job) {
    EXPECT_THROW(LaneSum(job, 1, 10), Error);
    EXPECT_THROW(LaneSum(job, 2, 0), Error);
    job.leave();
  });
}

// The weights after a loop in which the worker that was started as `victim` throws, on all others.
std::vector<std::vector<float>> weights_of_loop(int workers, int victim, std::int64_t at) {
  std::vector<std::vector<float>> results(static_cast<std::size_t>(workers));
  std::vector<Job> jobs = join_threads(workers);
  std::vector<std::thread> threads;
  for (int worker = 0; worker < workers; ++worker) {
    threads.emplace_back([&, worker,
                          job = std::move(jobs[static_cast<std::size_t>(worker)])]() mutable {
      LaneSum lanes(job, 5, 7, 2);
      std::vector<float> weights(7, 1.0F);
      try {
        run_steps(job, 6, {weights}, [&](std::int64_t step) {
          const auto sum = lanes.sum(
              step, [&](std::uint32_t lane, std::span<float> gradient, std::span<double> numbers) {
                if (worker == victim && step == at) throw std::runtime_error("asked for");
                compute(lane, gradient, numbers);
                for (std::size_t i = 0; i < gradient.size(); ++i) gradient[i] *= weights[i];
              });
          for (std::size_t i = 0; i < weights.size(); ++i) weights[i] -= 0.01F * sum.gradient[i];
        });
        job.leave();
        results[static_cast<std::size_t>(worker)] = weights;
      } catch (const std::runtime_error& error) {
        job.give_up(error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(Job, ALoopSurvivesAWorkerThatThrows) {
  const std::vector<float> alone = weights_of_loop(1, -1, 0)[0];
  ASSERT_FALSE(alone.empty());
  for (const int workers : {2, 3, 4}) {
    for (int victim = 0; victim < workers; ++victim) {
      const auto results = weights_of_loop(workers, victim, 1 + victim);
      for (int worker = 0; worker < workers; ++worker) {
        const auto& weights = results[static_cast<std::size_t>(worker)];
        EXPECT_EQ(weights, worker == victim ? std::vector<float>() : alone);
      }
    }
  }
}

// A worker whose only companion is lost, and comes back once the job has waited for it.
struct LonelyState : Job::State {
  explicit LonelyState(std::vector<Regroup>& regroups) : ways(regroups) {
    communicator = std::make_unique<Communicator>(
        std::make_unique<PlanEngine>(std::move(make_local_group(1)[0])), std::chrono::seconds(30));
  }
  bool survives(const Error&) const override { return true; }
  void regroup(std::int64_t, Regroup how) override {
    ways.push_back(how);
    too_few = how == Regroup::kAfterLoss;
  }

  std::vector<Regroup>& ways;
};

TEST(Job, ALoopWaitsWhileThereAreTooFewWorkers) {
  std::vector<Regroup> ways;
  std::vector<std::int64_t> steps;
  Job job(std::make_unique<LonelyState>(ways));
  run_steps(job, 2, {}, [&](std::int64_t step) {
    if (ways.empty()) throw Error(ErrorCode::kPeerLost, "asked for");
    EXPECT_FALSE(job.too_few());
    steps.push_back(step);
  });
  EXPECT_EQ(ways, (std::vector{Regroup::kAfterLoss, Regroup::kTooFew}));
  EXPECT_EQ(steps, (std::vector<std::int64_t>{1, 2}));
}

}  // namespace
}  // namespace lockstep::job_test
