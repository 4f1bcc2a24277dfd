#include <gtest/gtest.h>

#include "gpu_cases.h"
#include "local_device_transport.h"
#include "lockstep/comm/nccl/cuda_reducer.h"
#include "tests/support/generations.h"

// Replicas on a GPU that outlive their communicators, as tests/unit/replica_generations_test.cc has
// it for the CPU. The ranks are threads that share the GPU.

namespace lockstep {
namespace {

using test::Generations;

enum class Kind : std::uint8_t { kThroughHost, kGpuToGpu, kNccl };

const char* name_of(Kind kind) {
  return kind == Kind::kThroughHost ? "through host"
         : kind == Kind::kGpuToGpu  ? "GPU to GPU"
                                    : "NCCL";
}

// NCCL does not let ranks share a GPU; the test's transport does.
std::unique_ptr<DeviceReducer> make_local_reducer(Communicator& communicator,
                                                  const DeviceReducerOptions& options) {
  std::shared_ptr<LocalDeviceHub> hub;
  if (communicator.rank() == 0) {
    hub = std::make_shared<LocalDeviceHub>(communicator.world_size());
  }
  std::shared_ptr<LocalDeviceHub>* first = &hub;  // of rank 0, in the same process
  communicator.broadcast(BufferView(&first, sizeof(first), DataType::kU8), 0);
  if (communicator.rank() != 0) hub = *first;
  communicator.barrier();
  return std::make_unique<CudaReducer>(
      std::make_unique<LocalDeviceTransport>(hub, communicator.rank()), options, 1024);
}

Generations generations(Kind kind, bool shard, bool buddy = true) {
  Generations how;
  how.reducer.shard = shard;
  how.reducer.buddy = buddy;
  how.reducer.on_device = kind != Kind::kThroughHost;
  how.reducer.bucket_bytes = 16 << 10;
  how.make = [kind](const ReplicaOptions& options, ThreadPool&) {
    GpuParts parts;
    if (kind == Kind::kGpuToGpu) parts.make_reducer = make_local_reducer;
    return make_gpu_replica(options, parts);
  };
  return how;
}

TEST(GpuGenerations, HaveTheBitsOfOneWorkerAlone) {
  LOCKSTEP_NEEDS_GPU();
  const test::WholeState expected =
      run_generations(generations(Kind::kThroughHost, false), {1, 1, 1, 1, 1, 1});
  for (const Kind kind : {Kind::kThroughHost, Kind::kGpuToGpu}) {
    for (const bool shard : {false, true}) {
      for (const bool buddy : {true, false}) {
        if (!shard && !buddy) continue;
        SCOPED_TRACE(testing::Message()
                     << name_of(kind) << ", sharded " << shard << ", buddies " << buddy);
        EXPECT_TRUE(run_generations(generations(kind, shard, buddy), {3, 1, 2, 5, 4, 4}) ==
                    expected);
      }
    }
  }
  for (const bool shard : {false, true}) {  // a communicator of NCCL's for each
    EXPECT_TRUE(run_generations(generations(Kind::kNccl, shard), {1, 1, 1, 1, 1, 1}) == expected);
  }
}

TEST(GpuGenerations, AStepThatIsDecidedIsUpdatedWithoutTheCommunicator) {
  LOCKSTEP_NEEDS_GPU();
  for (const Kind kind : {Kind::kThroughHost, Kind::kGpuToGpu}) {
    SCOPED_TRACE(name_of(kind));
    test::expect_update_without_communicator(generations(kind, true), 5);
  }
}

TEST(GpuGenerations, AreDetachedInTheMiddleOfAStep) {
  LOCKSTEP_NEEDS_GPU();
  for (const bool shard : {false, true}) {
    test::expect_detached_in_a_step(generations(Kind::kThroughHost, shard));
  }
}

// What was given to the GPU is there again.
TEST(GpuGenerations, TakeNoMemoryWithThem) {
  LOCKSTEP_NEEDS_GPU();
  const auto free_bytes = [] {
    std::size_t free = 0;
    std::size_t total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "asking for free memory");
    return free;
  };
  test::Survivor worker(generations(Kind::kNccl, true));
  put(test::first_state(), worker.replica());
  std::atomic<int> buffers = 0;
  std::vector<std::size_t> free;
  for (int i = 0; i < 4; ++i) {
    const auto group = test::make_counting_group(1, buffers);
    worker.attach(*group[0]);
    worker.update(i, worker.add_up(*group[0], i));
    worker.share(*group[0]);
    worker.detach();
    free.push_back(free_bytes());
  }
  EXPECT_EQ(buffers, 0);
  // Libraries take something the first time.
  EXPECT_GE(free[3] + (std::size_t{1} << 20), free[1]);
}

}  // namespace
}  // namespace lockstep
