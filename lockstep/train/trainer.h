#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/data/lanes.h"
#include "lockstep/data/samples.h"
#include "lockstep/model/schedule.h"
#include "lockstep/train/agreement.h"
#include "lockstep/train/halt.h"
#include "lockstep/train/phases.h"
#include "lockstep/train/reducer.h"
#include "lockstep/train/replica.h"

namespace lockstep {

struct TrainerOptions {
  ModelConfig model;
  Precision precision = Precision::kF32;
  bool recompute = false;  // activations on a GPU
  std::uint64_t global_batch = 8;
  std::uint64_t micro_batch = 8;
  AdamWOptions adamw;
  Schedule schedule;  // its steps are those of the run
  double clip = 1.0;  // 0: none
  std::uint64_t seed = 0;
  std::int64_t eval_every = 0;  // 0: only after the last step
  std::uint64_t eval_samples = 64;
  ReducerOptions reducer;
  std::int64_t verify_every = 100;  // steps between comparisons of the replicas; 0: never
  std::vector<SkippedLane> skip_lanes;
  double straggler_share = 0.25;  // slower than the median by so much is worth a word
  // For tests: called on the way through a step, with the name of the place.
  std::function<void(std::string_view place, std::int64_t step)> at;
};

// What happened in one step. Losses are means per token, in nats.
struct StepReport {
  std::int64_t step = 0;  // from 1: the steps that are done
  double epoch = 0;       // passes over the data that are done
  double loss = 0;
  double gradient_norm = 0;  // of the mean gradient, before clipping
  double learning_rate = 0;
  std::int64_t tokens = 0;
  std::optional<double> validation_loss;
  double seconds = 0;  // of the step, without validation
  // By rank: data, forward and backward of this step, the rest of the one before it (with one
  // worker the optimizer of this one).
  std::vector<PhaseTimes> phases;
  std::optional<Straggler> straggler;  // over the last steps
  // What some rank asked for before the step ended, and all now do.
  int stop = 0;  // a signal's number
  bool save = false;
};

// What a rank asks of all; they act after the step in which one of them asks.
struct Requests {
  int stop = 0;  // a signal's number
  bool save = false;
};

// The lanes of every rank of a step. Throws Error{kInvalidArgument} if there are fewer than ranks.
LeafOwners lane_owners(const TrainerOptions& options, int world_size);
// What a rank's replica must be made for.
ReplicaOptions replica_options(const TrainerOptions& options, int rank, int world_size);
// Fresh parameters from the seed.
void initialise(Replica& replica, std::uint64_t seed, ThreadPool& pool);

// The step loop of one worker: its lanes' gradients, the sum over all workers' lanes, clipping,
// AdamW. The bits of the parameters depend on the options, the data and the kind of processor: not
// on the threads, and not on how many workers there are or how they talk (unless the reduction is
// an order-free one). Every worker makes the same calls. Errors of the communicator are final.
class Trainer {
 public:
  // Throws Error{kInvalidArgument} for options that cannot be.
  Trainer(const TrainerOptions& options, Samples training, Samples validation, Replica& replica,
          Communicator& communicator);

  const ParameterLayout& layout() const { return replica_.layout(); }
  Replica& replica() { return replica_; }
  GradientReducer& reducer() { return reducer_; }
  Communicator& communicator() { return communicator_; }
  const TrainerOptions& options() const { return options_; }
  const LanePlan& lanes() const { return lanes_; }
  std::int64_t steps_done() const { return step_; }
  // Go on from a state that was saved; the replica's own is set by the caller.
  void set_steps_done(std::int64_t steps) { step_ = steps; }

  // Before the first step: the workers compare their settings (`more` besides those the trainer
  // knows of), take rank 0's parameters and compare hashes.
  void start(std::vector<Setting> more = {});

  // One step. When a gradient is not finite, throws Error{kNonFinite} on every rank, with the same
  // message (see HaltReport); the parameters are as they were before the step.
  StepReport step(const Requests& requests = {});
  // Of the step that was not finite.
  const std::optional<HaltReport>& halt_report() const { return halt_report_; }

  // Mean loss over some of the validation samples, the same ones every time, whose batches the
  // workers share; nothing without any.
  std::optional<double> evaluate();

  // Whether all workers have the same weights: compare_replicas(). Returns their hash.
  std::string verify();

  // Steps until the schedule's end, or until all have agreed to stop. `requests` is asked before
  // the end of every step, `report` told after each.
  void run(const std::function<Requests()>& requests,
           const std::function<void(const StepReport&)>& report);

  // Adds to the time that the step's report will show, e.g. for saving.
  PhaseTimes& phases() { return phases_; }

 private:
  std::vector<Setting> settings() const;
  Batch read_batch(const Samples& samples, std::span<const std::uint64_t> ids);
  Batch lane_batch(std::uint32_t lane);
  std::int64_t run_lane(std::size_t index);
  std::vector<std::vector<double>> finish_lanes();
  void add_requests(const Requests& requests, std::vector<double>& tail) const;
  void read_tail(std::span<const double> tail, StepReport& report);
  double norm_of_shards(Range range);
  void begin_update(std::int64_t tokens, std::optional<double> norm);
  void share_parameters();
  [[noreturn]] void halt();
  HaltReport find_culprit();
  bool skipped(std::uint32_t lane) const;
  void at(std::string_view place) const {
    if (options_.at) options_.at(place, step_ + 1);
  }

  const TrainerOptions options_;
  const Samples training_;
  const Samples validation_;
  Replica& replica_;
  Communicator& communicator_;
  const LanePlan lanes_;
  GradientReducer reducer_;
  std::vector<double> block_sums_;
  std::int64_t step_ = 0;
  PhaseTimes phases_;                    // of the step under way; what the tail has told is zeroed
  std::vector<double> compute_seconds_;  // by rank, over the last steps
  std::optional<HaltReport> halt_report_;

  // The batch under way.
  std::vector<std::uint64_t> sample_ids_;
  std::vector<std::int32_t> tokens_;
  std::vector<std::int32_t> targets_;
};

}  // namespace lockstep
