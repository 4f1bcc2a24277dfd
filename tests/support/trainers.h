#pragma once

#include <memory>
#include <vector>

#include "lockstep/comm/local_group.h"
#include "lockstep/comm/plan_engine.h"
#include "lockstep/train/trainer.h"

namespace lockstep::testing {

// A worker of a group, with everything it needs; its parameters come from the seed.
struct TestWorker {
  TestWorker(const TrainerOptions& options, Samples training, Samples validation, int threads,
             std::unique_ptr<Transport> transport)
      : pool(threads),
        communicator(std::make_unique<PlanEngine>(std::move(transport)), std::chrono::seconds(20)),
        replica(make_cpu_replica(
            replica_options(options, communicator.rank(), communicator.world_size()), communicator,
            pool)),
        trainer(options, std::move(training), std::move(validation), *replica, communicator) {
    initialise(*replica, options.seed, pool);
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

}  // namespace lockstep::testing
