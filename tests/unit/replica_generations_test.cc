#include <gtest/gtest.h>

#include "tests/support/generations.h"
#include "tests/support/pretended_gpu.h"

// Replicas that outlive their communicators: what they give up, what they keep, and that a run over
// several groups of ranks has the bits of one rank alone.

namespace lockstep::replica_generations_test {
namespace {

using test::Generations;

enum class Kind : std::uint8_t { kCpu, kGpuThroughHost, kGpuToGpu };

const char* name_of(Kind kind) {
  return kind == Kind::kCpu ? "CPU" : kind == Kind::kGpuToGpu ? "GPU to GPU" : "GPU through host";
}

Generations generations(Kind kind, bool shard, bool buddy = true) {
  Generations how;
  how.reducer.shard = shard;
  how.reducer.buddy = buddy;
  how.reducer.on_device = kind == Kind::kGpuToGpu;
  how.reducer.bucket_bytes = 16 << 10;
  how.make = [kind](const ReplicaOptions& options, ThreadPool& pool) {
    return kind == Kind::kCpu ? make_cpu_replica(options, pool)
                              : make_gpu_replica(options, test::pretended_parts());
  };
  return how;
}

TEST(ReplicaGenerations, HaveTheBitsOfOneWorkerAlone) {
  // Sizes that stay, grow and fall, odd ones among them; ranks whose range stays, and others.
  const std::vector<int> sizes = {3, 1, 2, 5, 4, 4};
  const test::WholeState expected =
      run_generations(generations(Kind::kCpu, false), {1, 1, 1, 1, 1, 1});
  for (const Kind kind : {Kind::kCpu, Kind::kGpuThroughHost, Kind::kGpuToGpu}) {
    for (const bool shard : {false, true}) {
      for (const bool buddy : {true, false}) {
        if (!shard && !buddy) continue;
        SCOPED_TRACE(testing::Message()
                     << name_of(kind) << ", sharded " << shard << ", buddies " << buddy);
        EXPECT_TRUE(run_generations(generations(kind, shard, buddy), sizes) == expected);
      }
    }
  }
}

TEST(ReplicaGenerations, AStepThatIsDecidedIsUpdatedWithoutTheCommunicator) {
  for (const Kind kind : {Kind::kCpu, Kind::kGpuThroughHost, Kind::kGpuToGpu}) {
    for (const bool buddy : {true, false}) {
      SCOPED_TRACE(testing::Message() << name_of(kind) << ", buddies " << buddy);
      test::expect_update_without_communicator(generations(kind, true, buddy), 5);
    }
  }
}

TEST(ReplicaGenerations, AreDetachedInTheMiddleOfAStep) {
  for (const Kind kind : {Kind::kCpu, Kind::kGpuThroughHost, Kind::kGpuToGpu}) {
    for (const bool shard : {false, true}) {
      SCOPED_TRACE(testing::Message() << name_of(kind) << ", sharded " << shard);
      test::expect_detached_in_a_step(generations(kind, shard));
    }
  }
}

TEST(ReplicaGenerations, GiveUpTheMemoryOfAccumulators) {
  test::Survivor worker(generations(Kind::kCpu, true));
  const std::size_t before = worker.replica().state_bytes();
  std::atomic<int> buffers = 0;
  const auto group = test::make_counting_group(1, buffers);
  worker.attach(*group[0]);
  EXPECT_GT(buffers, 0);
  EXPECT_GT(worker.replica().state_bytes(), before);
  worker.detach();
  EXPECT_EQ(buffers, 0);
  EXPECT_EQ(worker.replica().state_bytes(), before);
}

}  // namespace
}  // namespace lockstep::replica_generations_test
