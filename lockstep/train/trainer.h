#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/float_buffer.h"
#include "lockstep/data/lanes.h"
#include "lockstep/data/samples.h"
#include "lockstep/model/schedule.h"
#include "lockstep/train/agreement.h"
#include "lockstep/train/checkpoint/run_state.h"
#include "lockstep/train/halt.h"
#include "lockstep/train/lane_balance.h"
#include "lockstep/train/outside_average.h"
#include "lockstep/train/reducer.h"
#include "lockstep/train/replica.h"
#include "lockstep/train/step_report.h"

namespace lockstep {

struct TrainerOptions {
  ModelConfig model;
  Precision precision = Precision::kF32;
  GpuVersions gpu;         // where it is computed, and with what; for the record
  bool recompute = false;  // activations, in the backward pass; the same bits
  std::uint64_t global_batch = 8;
  std::uint64_t micro_batch = 8;
  AdamWOptions adamw;
  Schedule schedule;  // also says how many steps the run has
  double clip = 1.0;  // 0: none
  std::uint64_t seed = 0;
  Mix mix;                      // of the samples
  std::int64_t eval_every = 0;  // 0: only after the last step
  std::uint64_t eval_samples = 64;
  std::int64_t early_stop = 0;  // validations without a better one that end the run; 0: never
  ReducerOptions reducer;
  // Average with these workers in every step; null: there are none. For a communicator of one rank
  // and an optimizer without shards. It outlives the trainer.
  OutsideAverage* outside = nullptr;
  std::int64_t verify_every = 100;  // steps between comparisons of the replicas; 0: never
  std::vector<SkippedLane> skip_lanes;
  // Lanes follow speed: slow ranks get fewer. Not with a reduction that is order-free, whose bits
  // depend on who owns which lanes, and not where every rank has just one lane.
  bool balance = true;
  LaneBalanceOptions balance_rule;
  // For tests: called at named places of a step: step, lane (and lane3 before lane 3), data,
  // forward, backward, bucket, communication, tail, norm, update, gather, with the step under way;
  // validation, verify, save and end with the last step that is done; transfer (see level()) with
  // the step that comes next.
  std::function<void(std::string_view place, std::int64_t step)> at;
};

// What a rank requests of all ranks. They act after the step in which one of them requests it.
struct Requests {
  int stop = 0;  // a signal's number
  bool save = false;
  std::uint32_t save_request = 0;  // of the job, by its number; 0: none. Rank 0 tells it
  bool regroup = false;            // newcomers wait
  int leave = 0;  // this rank wants to go: 0 no, 1 asked, 2 asked a second ago or more
};

// What all ranks do after a step in which the ranks have requested this, into `report`: its stop,
// save, regroup and leaving. Ranks that asked a second ago leave, but if all ranks have asked it is
// a stop by SIGTERM. Of buddies one goes at a time, so that no moments are lost; without buddies
// the state is saved before a shard goes. Pure.
void decide_requests(std::span<const Requests> by_rank, const ReducerOptions& reducer,
                     StepReport& report);

// Why Trainer::run() has ended.
enum class RunEnd : std::uint8_t {
  kDone,     // the schedule has ended, or no better validation has come for too long
  kStopped,  // by a request
  kRegroup,  // the generation ends here, as planned: StepReport::regroup or leaving
  kOutside,  // TrainerOptions::outside has ended the job
};

// What the model makes of samples that it is not trained on.
struct Validation {
  double loss = 0;      // mean per token
  double accuracy = 0;  // share of tokens
  bool operator==(const Validation&) const = default;
};

// What has been done between the last step and the next.
struct StepBoundary {
  StepReport report;  // of the last step
  double norm = 0;    // of the sum of its gradients: who has the sum, but no norm, needs this one
  bool verified = false;
  bool evaluated = false;  // and recorded
  bool reported = false;   // on this rank
  bool closed = false;     // all of it is done
};

// The step under way, once this rank has its tail and the sum over all lanes.
struct OpenStep {
  StepReport report;
  Range held;  // where this rank has the sum
  // With shards the norm is known. It takes the block sums of all ranks, so all ranks have their
  // sums then, and the step will be done by whoever survives.
  bool decided = false;
  double norm = 0;
  bool begun = false;    // the update
  bool updated = false;  // parameters and moments of `held` are those after the step
};

// Moments of a generation that has ended, on the host.
struct KeptMoments {
  Range range;
  std::int64_t step = 0;  // steps done
  FloatBuffer first;
  FloatBuffer second;
};

// Where a trainer stands. It outlives generations; level() makes it the same on all ranks.
struct TrainerStanding {
  bool has_state =
      false;  // the replica's parameters, and moments where they are held, are of `step`
  std::int64_t step = 0;  // steps done
  ValidationRecord validation;
  std::optional<StepBoundary> last;  // none before the first step
  std::optional<OpenStep> open;
  // With shards.
  bool has_moments = false;       // the replica's are those of Replica::shard()
  std::vector<KeptMoments> kept;  // until the first step of the next generation is done
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
// reduction is order-free. Every worker makes the same calls, on one thread.
//
// A trainer outlives its communicator. After an Error of the communicator, or when a generation
// ends as planned: detach(), then level() in the next generation, then run() goes on. A step is
// done on a rank when its update is: from then on the rank never goes back before it.
class Trainer {
 public:
  // Throws Error{kInvalidArgument} for options that contradict each other. The replica must outlive
  // the trainer.
  Trainer(const TrainerOptions& options, Samples training, Samples validation, Replica& replica);
  // The replica is attached to the communicator, which must live until detach().
  Trainer(const TrainerOptions& options, Samples training, Samples validation, Replica& replica,
          Communicator& communicator);

  // Takes part in another generation, with a replica that is detached; lanes are dealt evenly.
  // Parameters stay. Shards of moments are those of other ranks now, and are not set: level() does
  // all that is needed to go on, and calls this.
  void attach(Communicator& communicator);
  // Before the communicator goes, also after any Error of it: gives up all memory of it, the
  // replica's included. Until attach() only layout(), standing(), options and the like may be
  // called. Idempotent. Throws what Replica::detach() throws.
  void detach();
  bool attached() const { return communicator_ != nullptr; }

  const ParameterLayout& layout() const { return replica_.layout(); }
  Replica& replica() { return replica_; }
  GradientReducer& reducer() { return *reducer_; }
  Communicator& communicator() { return *communicator_; }
  const TrainerOptions& options() const { return options_; }
  const LanePlan& lanes() const { return lanes_; }
  const Samples& training() const { return training_; }
  const Samples& validation_samples() const { return validation_; }
  std::int64_t steps_done() const { return standing_.step; }
  const ValidationRecord& validation() const { return standing_.validation; }
  // No step follows: all are done, or --early-stop has ended them.
  bool finished() const { return standing_.step >= options_.schedule.steps || ends_early(); }
  // The last step that is done; none before the first.
  const StepReport* last_report() const {
    return standing_.last ? &standing_.last->report : nullptr;
  }
  // For level(). decide() makes the update of the open step while detached: another rank knows its
  // norm, and this is its report there.
  TrainerStanding& standing() { return standing_; }
  void decide(const StepReport& report, double norm);
  // For level(): this rank stands where others do now. Their step has carried its requests.
  void stand(TrainerStanding standing);
  // For a run that is resumed; restore() sets the state of the replica.
  void set_steps_done(std::int64_t steps) { standing_.step = steps; }
  void set_validation(const ValidationRecord& record) { standing_.validation = record; }

  // Before the first step: the workers compare their settings (the trainer's and `more`), take the
  // parameters of rank 0 and compare hashes. All have a whole state then.
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

  // Over eval_samples of the validation samples, which are spread evenly (see spread_samples()) and
  // always the same; the workers share the batches. Nothing when there are no validation samples.
  std::optional<Validation> evaluate();

  // Throws Error{kReplicaMismatch} unless all workers have the same weights. Returns their hash.
  std::string verify();

  // Makes steps until the schedule ends, a rank requests a stop, early_stop validations in a row
  // were not the best, or the generation is to end. Calls `requests` before every step, and after
  // it `report`, once on every rank, then `save`: what ranks do together between steps. After an
  // Error of the communicator and level() it first finishes what was open: validation, verify and
  // `save` are repeated by all ranks when one of them has not done them, `report` is not; a
  // newcomer reports the last step, too. A request to stop or save is repeated until a step that
  // carried it is done; `requests` is asked for the others each time. A validation because of a
  // stop is not recorded: the run that goes on is as if it had never been stopped. A run that has
  // ended stays so when run() is called again.
  RunEnd run(const std::function<Requests()>& requests,
             const std::function<void(const StepReport&)>& report,
             const std::function<void(const StepReport&)>& save = {});

  // Times that the next reports will show; callers add their own, such as saving.
  PhaseTimes& phases() { return phases_; }

  // Calls TrainerOptions::at.
  void at(std::string_view place, std::int64_t step) const {
    if (options_.at) options_.at(place, step);
  }

 private:
  void connect(Communicator& communicator);
  void keep_moments();
  void finish_open_update();
  UpdateRequest update_request(std::int64_t tokens, std::optional<double> norm) const;
  std::vector<Setting> settings() const;
  Batch read_batch(const Samples& samples, std::span<const std::uint64_t> ids);
  Batch lane_batch(std::uint32_t lane);
  std::int64_t run_lane(std::size_t index);
  std::vector<std::vector<double>> finish_lanes();
  void add_requests(const Requests& requests, std::vector<double>& tail) const;
  void read_tail(std::span<const double> tail, StepReport& report);
  // False: TrainerOptions::outside has ended the job, and nothing has changed.
  bool make_step(const Requests& requests);
  void balance();
  void commit();
  void verify_if_due();
  void evaluate_if_due();
  void finish_boundary(const std::function<void(const StepReport&)>& report,
                       const std::function<void(const StepReport&)>& save);
  double norm_of_shards(Range range);
  void begin_update(std::int64_t tokens, std::optional<double> norm);
  void set_share(Range samples);
  // False: the others have ended the job.
  bool average_outside(StepReport& report);
  void know_norm(double norm);
  // What the gradient in the accumulator is divided by: outside, means come back.
  std::int64_t divisor(const StepReport& report) const {
    return options_.outside != nullptr ? 1 : report.tokens;
  }
  void share_parameters();
  [[noreturn]] void halt();
  HaltReport find_culprit();
  bool skipped(std::uint32_t lane) const;
  void record_validation(StepReport& report);
  bool ends_early() const {
    return options_.early_stop > 0 && standing_.validation.since_best >= options_.early_stop;
  }
  // In the step under way.
  void at(std::string_view place) const { at(place, standing_.step + 1); }

  const TrainerOptions options_;
  const Samples training_;
  const Samples validation_;
  Replica& replica_;
  const LanePlan lanes_;
  const std::vector<std::uint64_t> validation_ids_;  // what is validated on
  std::vector<double> block_sums_;
  TrainerStanding standing_;
  Requests asked_;     // a stop or a save that no step has carried yet
  PhaseTimes phases_;  // not sent with a tail yet
  std::optional<HaltReport> halt_report_;

  // Of the generation.
  Communicator* communicator_ = nullptr;  // none while detached
  LeafOwners owners_;
  std::optional<GradientReducer> reducer_;
  std::optional<LaneBalance> balance_;
  std::vector<double> compute_seconds_;  // by rank, over the last steps

  Range share_;  // of the step's samples: those of all ranks; fewer with TrainerOptions::outside
  // The batch under way.
  std::vector<std::uint64_t> sample_ids_;
  std::vector<std::int32_t> tokens_;
  std::vector<std::int32_t> targets_;
};

}  // namespace lockstep
