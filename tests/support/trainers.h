#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "lockstep/base/random.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/transport/local_group.h"
#include "lockstep/train/replica.h"
#include "lockstep/train/trainer.h"

namespace lockstep::test {

inline constexpr int kContext = 16;

// Something to learn: i, 2 i, 3 i, ...
inline Samples some_samples(std::uint64_t count) {
  std::vector<std::int32_t> tokens(count * kContext + 1);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::int32_t>((i * (i / 64 % 5 + 1)) % 48);
  }
  return Samples({TokenShard::of("tokens", tokens, {})}, 64, kContext);
}

// A model that learns it in no time.
inline TrainerOptions small_training() {
  TrainerOptions options;
  options.model.vocab = 64;
  options.model.hidden = 32;
  options.model.layers = 2;
  options.model.heads = 4;
  options.model.kv_heads = 2;
  options.model.intermediate = 48;
  options.model.context = kContext;
  options.schedule.peak = 1e-2;
  options.seed = 11;
  return options;
}

// Eleven lanes, which divide evenly among no number of workers but one and eleven.
inline TrainerOptions eleven_lanes() {
  TrainerOptions options = small_training();
  options.global_batch = 22;
  options.micro_batch = 2;
  options.schedule.steps = 6;
  options.eval_every = 3;
  options.verify_every = 2;
  options.clip = 0.05;  // so that every step is clipped
  options.reducer.bucket_bytes = 16 << 10;
  return options;
}

// Owners as no rule would choose them, another deal for every `seed`: any lane to any rank, or
// (with an even seed) runs of odd lengths. Nobody needs more accumulators than somebody does with
// even_owners().
inline LeafOwners odd_owners(std::size_t lanes, int workers, std::uint64_t seed) {
  const std::uint32_t most = most_accumulators(even_owners(lanes, workers), workers);
  for (std::uint64_t attempt = 0;; ++attempt) {
    LeafOwners owners;
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      const std::uint64_t random = random_u64(seed, attempt, lane);
      owners.push_back(static_cast<int>(random % static_cast<std::uint64_t>(workers)));
    }
    if (seed % 2 == 0) std::ranges::sort(owners);
    const auto needed = accumulators_by_rank(owners, workers);
    if (std::ranges::min(needed) > 0 && std::ranges::max(needed) <= most) return owners;
  }
}

// A worker of a group, with everything it needs; its parameters come from the seed. On the CPU
// unless it is given the parts of a GPU.
struct TestWorker {
  TestWorker(const TrainerOptions& options, Samples training, Samples validation, int threads,
             std::unique_ptr<Transport> transport, const GpuParts* gpu = nullptr)
      : pool(threads),
        communicator(std::make_unique<PlanEngine>(std::move(transport)), std::chrono::seconds(20)),
        replica(make_replica(
            replica_options(options, communicator.rank(), communicator.world_size()), gpu)),
        trainer(options, std::move(training), std::move(validation), *replica, communicator) {
    initialise(*replica, options.seed, pool);
  }

  std::unique_ptr<Replica> make_replica(const ReplicaOptions& options, const GpuParts* gpu) {
    return gpu != nullptr ? make_gpu_replica(options, communicator, *gpu)
                          : make_cpu_replica(options, communicator, pool);
  }
  std::vector<float> parameters() const {
    std::vector<float> values(replica->layout().size());
    replica->get_parameters(values);
    return values;
  }

  ThreadPool pool;
  Communicator communicator;
  std::unique_ptr<Replica> replica;
  Trainer trainer;
};

struct SoloTrainer : TestWorker {
  SoloTrainer(const TrainerOptions& options, Samples training, Samples validation, int threads)
      : TestWorker(options, std::move(training), std::move(validation), threads,
                   std::move(make_local_group(1)[0])) {}
};

}  // namespace lockstep::test
