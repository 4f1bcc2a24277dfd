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
#include "lockstep/train/checkpoint/run_state.h"
#include "lockstep/train/halt.h"
#include "lockstep/train/lane_balance.h"
#include "lockstep/train/reducer.h"
#include "lockstep/train/replica.h"
#include "lockstep/train/step_report.h"

namespace lockstep {

struct TrainerOptions {
  ModelConfig model;
  Precision precision = Precision::kF32;
  bool recompute = false;  // activations on a GPU, in the backward pass
  std::uint64_t global_batch = 8;
  std::uint64_t micro_batch = 8;
  AdamWOptions adamw;
  Schedule schedule;  // also says how many steps the run has
  double clip = 1.0;  // 0: none
  std::uint64_t seed = 0;
  std::int64_t eval_every = 0;  // 0: only after the last step
  std::uint64_t eval_samples = 64;
  std::int64_t early_stop = 0;  // validations without a better one that end the run; 0: never
  ReducerOptions reducer;
  std::int64_t verify_every = 100;  // steps between comparisons of the replicas; 0: never
  std::vector<SkippedLane> skip_lanes;
  // Lanes follow speed: slow ranks get fewer. Not with a reduction that is order-free, whose bits
  // depend on who owns which lanes, and not where every rank has just one lane.
  bool balance = true;
  LaneBalanceOptions balance_rule;
  // For tests: called at named places of a step.
  std::function<void(std::string_view place, std::int64_t step)> at;
};

// What a rank requests of all ranks. They act after the step in which one of them requests it.
struct Requests {
  int stop = 0;  // a signal's number
  bool save = false;
};

// Which rank has which lanes at the start. Throws Error{kInvalidArgument} when there are fewer
// lanes than ranks.
LeafOwners lane_owners(const TrainerOptions& options, int world_size);
// The options of a rank's replica.
ReplicaOptions replica_options(const TrainerOptions& options, int rank, int world_size);
// Sets the parameters to random numbers from the seed.
void initialise(Replica& replica, std::uint64_t seed, ThreadPool& pool);

// The step loop of one worker: the gradients of its lanes, the sum over the lanes of all workers,
// clipping, AdamW. The bits of the parameters depend on the options, the data and the kind of
// processor. They do not depend on threads or transport, nor on the number of workers unless the
// reduction is order-free. Every worker makes the same calls, on one thread. After an error of the
// communicator the trainer cannot be used.
class Trainer {
 public:
  // Throws Error{kInvalidArgument} for options that contradict each other. Replica and communicator
  // must outlive the trainer.
  Trainer(const TrainerOptions& options, Samples training, Samples validation, Replica& replica,
          Communicator& communicator);

  const ParameterLayout& layout() const { return replica_.layout(); }
  Replica& replica() { return replica_; }
  GradientReducer& reducer() { return reducer_; }
  Communicator& communicator() { return communicator_; }
  const TrainerOptions& options() const { return options_; }
  const LanePlan& lanes() const { return lanes_; }
  const Samples& training() const { return training_; }
  std::int64_t steps_done() const { return step_; }
  const ValidationRecord& validation() const { return validation_record_; }
  // For a run that is resumed; restore() sets the state of the replica.
  void set_steps_done(std::int64_t steps) { step_ = steps; }
  void set_validation(const ValidationRecord& record) { validation_record_ = record; }

  // Before the first step: the workers compare their settings (the trainer's and `more`), take the
  // parameters of rank 0 and compare hashes.
  void start(std::vector<Setting> more = {});

  // Which rank has which lanes in the next step.
  const LeafOwners& owners() const { return owners_; }
  // Deals the lanes anew, before a step and on all ranks alike. No bit of the result changes,
  // unless the reduction is order-free. Every rank owns a lane and needs no more accumulators than
  // most_accumulators() of the owners of the start.
  void set_owners(const LeafOwners& owners);

  // One step. Throws Error{kNonFinite} on every rank, with the same message (see HaltReport), when
  // a gradient or a loss is not finite; the parameters are then as they were before the step.
  StepReport step(const Requests& requests = {});
  // Set when step() has thrown Error{kNonFinite}.
  const std::optional<HaltReport>& halt_report() const { return halt_report_; }

  // The mean loss over eval_samples of the validation samples, which are spread evenly and always
  // the same; the workers share the batches. Nothing when there are no validation samples.
  std::optional<double> evaluate();

  // Throws Error{kReplicaMismatch} unless all workers have the same weights. Returns their hash.
  std::string verify();

  // Makes steps until the schedule ends, a rank requests a stop, or early_stop validations in a row
  // were not the best. Calls `requests` before and `report` after every step. A validation because
  // of a stop is not recorded: the run that goes on is as if it had never been stopped.
  void run(const std::function<Requests()>& requests,
           const std::function<void(const StepReport&)>& report);

  // Times that the next reports will show; callers add their own, such as saving.
  PhaseTimes& phases() { return phases_; }

 private:
  std::vector<Setting> settings() const;
  Batch read_batch(const Samples& samples, std::span<const std::uint64_t> ids);
  Batch lane_batch(std::uint32_t lane);
  std::int64_t run_lane(std::size_t index);
  std::vector<std::vector<double>> finish_lanes();
  void add_requests(const Requests& requests, std::vector<double>& tail) const;
  void read_tail(std::span<const double> tail, StepReport& report);
  void balance(StepReport& report);
  double norm_of_shards(Range range);
  void begin_update(std::int64_t tokens, std::optional<double> norm);
  void share_parameters();
  [[noreturn]] void halt();
  HaltReport find_culprit();
  bool skipped(std::uint32_t lane) const;
  void record_validation(StepReport& report);
  bool ends_early() const {
    return options_.early_stop > 0 && validation_record_.since_best >= options_.early_stop;
  }
  void at(std::string_view place) const {
    if (options_.at) options_.at(place, step_ + 1);
  }

  const TrainerOptions options_;
  const Samples training_;
  const Samples validation_;
  Replica& replica_;
  Communicator& communicator_;
  const LanePlan lanes_;
  LeafOwners owners_;
  GradientReducer reducer_;
  std::optional<LaneBalance> balance_;
  std::vector<double> block_sums_;
  std::int64_t step_ = 0;
  ValidationRecord validation_record_;
  PhaseTimes phases_;                    // not sent with a tail yet
  std::vector<double> compute_seconds_;  // by rank, over the last steps
  std::optional<HaltReport> halt_report_;

  // The batch under way.
  std::vector<std::uint64_t> sample_ids_;
  std::vector<std::int32_t> tokens_;
  std::vector<std::int32_t> targets_;
};

}  // namespace lockstep
