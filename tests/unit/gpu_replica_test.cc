#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "lockstep/train/replica.h"
#include "tests/support/pretended_gpu.h"
#include "tests/support/ranks.h"
#include "tests/support/trainers.h"

namespace lockstep::gpu_replica_test {
namespace {

using ::lockstep::test::eleven_lanes;
using ::lockstep::test::some_samples;
using ::testing::HasSubstr;

const GpuParts kPretended = test::pretended_parts();

// A worker on such a GPU, or on the CPU.
struct Worker : test::TestWorker {
  Worker(const TrainerOptions& options, bool gpu, std::unique_ptr<Transport> transport,
         const Samples& samples = some_samples(60))
      : TestWorker(options, samples, some_samples(9), 1, std::move(transport),
                   gpu ? &kPretended : nullptr) {}
};

struct Result {
  std::string hash;
  std::vector<double> losses;
  bool operator==(const Result&) const = default;
};

// With `odd`, lanes change hands before every step.
Result train(const TrainerOptions& options, int workers, bool gpu, bool odd = false) {
  auto group = make_local_group(workers);
  std::vector<Result> results(static_cast<std::size_t>(workers));
  const auto errors = test::run_ranks(workers, [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    Worker worker(options, gpu, std::move(group[index]));
    worker.trainer.start();
    worker.trainer.run(
        [&] {
          const auto step = static_cast<std::uint64_t>(worker.trainer.steps_done());
          if (odd) worker.trainer.set_owners(test::odd_owners(11, workers, step));
          return Requests{};
        },
        [&](const StepReport& report) { results[index].losses.push_back(report.loss); });
    results[index].hash = worker.trainer.verify();
    worker.communicator.barrier();
  });
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
  for (const Result& result : results) EXPECT_EQ(result, results[0]);
  return results[0];
}

// However the sums get off the device and back, the result is the CPU's.
TEST(GpuReplica, HasTheCpusBitsHoweverSumsTravel) {
  const Result expected = train(eleven_lanes(), 1, false);
  EXPECT_EQ(train(eleven_lanes(), 1, true), expected);
  for (const int workers : {1, 2, 3, 5}) {
    for (const bool on_device : {false, true}) {
      for (const bool shard : {false, true}) {
        for (const bool overlap : {false, true}) {
          TrainerOptions options = eleven_lanes();
          options.reducer.on_device = on_device;
          options.reducer.shard = shard;
          options.reducer.overlap = overlap;
          EXPECT_EQ(train(options, workers, true), expected)
              << workers << " workers, on device " << on_device << ", sharded " << shard
              << ", overlap " << overlap;
        }
      }
    }
  }
}

TEST(GpuReplica, HasTheCpusBitsWhoeverOwnsTheLanes) {
  const Result expected = train(eleven_lanes(), 1, false);
  for (const bool on_device : {false, true}) {
    for (const bool shard : {false, true}) {
      TrainerOptions options = eleven_lanes();
      options.reducer.on_device = on_device;
      options.reducer.shard = shard;
      EXPECT_EQ(train(options, 3, true, true), expected)
          << "on device " << on_device << ", sharded " << shard;
    }
  }
}

TEST(GpuReplica, HasTheCpusBitsInOrderFreeWaysToo) {
  for (const int workers : {1, 3}) {
    TrainerOptions ring = eleven_lanes();
    ring.reducer.reduction = Reduction::kRing;
    TrainerOptions rounded = eleven_lanes();
    rounded.reducer.wire = DataType::kBf16;
    for (TrainerOptions& options : {std::ref(ring), std::ref(rounded)}) {
      for (const bool overlap : {false, true}) {
        options.reducer.overlap = overlap;
        EXPECT_EQ(train(options, workers, true), train(options, workers, false))
            << workers << " workers, overlap " << overlap;
      }
    }
  }
}

TEST(GpuReplica, LeavesLanesOut) {
  TrainerOptions options = eleven_lanes();
  options.skip_lanes = {{1, 0}, {2, 10}, {3, 4}};
  const Result expected = train(options, 1, false);
  EXPECT_EQ(train(options, 1, true), expected);
  EXPECT_EQ(train(options, 3, true), expected);
}

TEST(GpuReplica, HaltsWithAllAsItWas) {
  for (const int workers : {1, 2}) {
    for (const bool on_device : {false, true}) {
      TrainerOptions options = eleven_lanes();
      options.reducer.on_device = on_device;
      auto group = make_local_group(workers);
      const auto errors = test::run_ranks(workers, [&](int rank) {
        Worker worker(options, true, std::move(group[static_cast<std::size_t>(rank)]));
        worker.trainer.start();
        worker.trainer.step();
        const Range range = worker.replica->layout().range(Component::kDown, 1);
        std::vector<float> before(worker.replica->layout().size());
        worker.replica->complete_parameters([&](std::span<float> parameters) {
          parameters[range.begin + 5] = std::numeric_limits<float>::quiet_NaN();
          std::ranges::copy(parameters, before.begin());
        });
        try {
          worker.trainer.step();
          ADD_FAILURE() << "no error";
        } catch (const Error& error) {
          EXPECT_THAT(error.what(), HasSubstr("step 2: weight model.layers.1.mlp.down_proj.weight, "
                                              "element 5, is nan"));
        }
        std::vector<float> after(before.size());
        worker.replica->get_parameters(after);
        EXPECT_EQ(std::memcmp(before.data(), after.data(), before.size() * sizeof(float)), 0);
        worker.communicator.barrier();
      });
      for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
    }
  }
}

// What is enqueued ends undone, and only check() tells.
class BreakingReducer final : public DeviceReducer {
 public:
  enum class At : std::uint8_t { kReduce, kGather };

  BreakingReducer(Communicator& communicator, const DeviceReducerOptions& options, At at)
      : reducer_(communicator, options), at_(at) {}

  void set_owners(const LeafOwners& owners) override { reducer_.set_owners(owners); }
  void reduce(std::span<float* const> partials, Range range, DeviceStream stream) override {
    if (at_ != At::kReduce) return reducer_.reduce(partials, range, stream);
    broken_ = true;
    std::fill(partials[0] + range.begin, partials[0] + range.end, 123.0F);
  }
  void all_gather(float* values, DeviceStream stream) override {
    if (at_ != At::kGather) return reducer_.all_gather(values, stream);
    broken_ = true;
  }
  void check() override {
    if (broken_) throw Error(ErrorCode::kPeerLost, "rank 1 is gone", 1);
  }
  void abort() noexcept override {}

 private:
  test::PretendedReducer reducer_;
  const At at_;
  bool broken_ = false;
};

// An exchange that has failed is not followed by an update.
TEST(GpuReplica, UpdatesOnlyWhenTheExchangeIsKnownToBeDone) {
  using At = BreakingReducer::At;
  for (const At at : {At::kReduce, At::kGather}) {
    for (const bool shard : {true, false}) {
      if (at == At::kGather && !shard) continue;  // nothing is gathered; nor among three ranks
      GpuParts parts = kPretended;
      parts.make_reducer = [at](Communicator& communicator, const DeviceReducerOptions& options) {
        return std::make_unique<BreakingReducer>(communicator, options, at);
      };
      TrainerOptions options = eleven_lanes();
      options.reducer.on_device = true;
      options.reducer.shard = shard;
      auto group = make_local_group(4);
      const auto errors = test::run_ranks(4, [&](int rank) {
        test::TestWorker worker(options, some_samples(60), some_samples(9), 1,
                                std::move(group[static_cast<std::size_t>(rank)]), &parts);
        worker.trainer.start();
        const std::vector<float> before = worker.parameters();
        EXPECT_EQ(test::error_of([&] { worker.trainer.step(); }).code(), ErrorCode::kPeerLost);
        EXPECT_EQ(worker.trainer.steps_done(), 0);
        if (at == At::kReduce) {
          EXPECT_TRUE(worker.parameters() == before);
        }
        worker.communicator.barrier();
      });
      for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
    }
  }
}

// One embedding is so large that adding the first block's output overflows: only the sample with
// its token has no gradient, and its lane is found by computing the lanes one by one.
TEST(GpuReplica, FindsTheLaneThatIsNotFinite) {
  std::vector<std::int32_t> tokens(60 * test::kContext + 1, 3);
  constexpr std::uint64_t kBadSample = 17;
  tokens[kBadSample * test::kContext + 4] = 9;
  const Samples samples({TokenShard::of("tokens", tokens, {})}, 64, test::kContext);
  for (const int workers : {1, 2}) {
    for (const bool on_device : {false, true}) {
      TrainerOptions options = eleven_lanes();
      options.global_batch = 60;
      options.reducer.on_device = on_device;
      auto group = make_local_group(workers);
      const auto errors = test::run_ranks(workers, [&](int rank) {
        Worker worker(options, true, std::move(group[static_cast<std::size_t>(rank)]), samples);
        const ParameterLayout& layout = worker.replica->layout();
        worker.replica->complete_parameters([&](std::span<float> parameters) {
          const Range embedding = layout.range(Component::kEmbedding);
          const Range output = layout.range(Component::kOutput, 0);
          for (std::size_t i = 0; i < 32; ++i) parameters[embedding.begin + 9 * 32 + i] = 3.4e38F;
          for (std::size_t i = output.begin; i < output.end; ++i) parameters[i] *= 1e38F;
        });
        worker.trainer.start();
        worker.trainer.set_owners(test::odd_owners(30, workers, 1));  // any lane to anybody
        EXPECT_THROW(worker.trainer.step(), Error);
        const auto& halted = worker.trainer.halt_report();
        ASSERT_TRUE(halted);
        EXPECT_EQ(halted->rank, worker.trainer.owners()[halted->lane]);
        EXPECT_THAT(halted->samples, ::testing::Contains(kBadSample));
        worker.communicator.barrier();
      });
      for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
    }
  }
}

}  // namespace
}  // namespace lockstep::gpu_replica_test
