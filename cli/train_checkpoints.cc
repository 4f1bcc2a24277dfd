#include "cli/train_checkpoints.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::cli {
namespace {

// A disk that takes longer than this for one checkpoint is taken for dead.
constexpr auto kPatience = std::chrono::hours(1);

CheckpointPolicy policy_of(const TrainOptions& options, const RunState& run,
                           std::vector<std::int64_t> known_bad) {
  if (options.save_every > 0 && options.out.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "--save-every needs --out");
  }
  return {.out = options.out,
          .save_every = options.save_every,
          .keep_last = options.keep_last,
          .wait = options.save_wait,
          .last_step = run.settings.schedule.steps,
          .known_bad = std::move(known_bad)};
}

}  // namespace

std::optional<ResumePoint> resume_point(const TrainOptions& options) {
  if (options.resume && !options.init.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "--resume has weights of its own: it does not go with --init");
  }
  return find_resume_point(options.out, options.resume);
}

RunState run_state(const TrainerOptions& how, const Samples& training) {
  RunState run;
  run.settings = {.model = how.model,
                  .precision = how.precision,
                  .global_batch = how.global_batch,
                  .micro_batch = how.micro_batch,
                  .adamw = how.adamw,
                  .schedule = how.schedule,
                  .clip = how.clip,
                  .seed = how.seed};
  run.data = identify(training);
  run.versions = these_versions();
  return run;
}

void restore(Trainer& trainer, ResumePoint& point, const RunState& now) {
  require_same_run(point.state.run, now);
  std::ranges::copy(point.state.parameters.span(), trainer.parameters().begin());
  std::ranges::copy(point.state.first_moment.span(), trainer.optimizer().first_moment().begin());
  std::ranges::copy(point.state.second_moment.span(), trainer.optimizer().second_moment().begin());
  trainer.resume_after(point.state.run.step);
  point.state = {};
}

TrainCheckpoints::TrainCheckpoints(const TrainOptions& options, RunState run,
                                   std::shared_ptr<const Tokenizer> tokenizer,
                                   std::vector<std::int64_t> known_bad)
    : keeper_(policy_of(options, run, std::move(known_bad)), run, std::move(tokenizer)) {}

void TrainCheckpoints::finish(Trainer& trainer) {
  save(trainer, true);
  keeper_.finish(Deadline::after(kPatience));
}

void TrainCheckpoints::save(Trainer& trainer, bool stopping) {
  keeper_.after_step(
      trainer.steps_done(), stopping,
      [&](TrainingState& state) {
        std::ranges::copy(trainer.parameters(), state.parameters.data());
        std::ranges::copy(trainer.optimizer().first_moment(), state.first_moment.data());
        std::ranges::copy(trainer.optimizer().second_moment(), state.second_moment.data());
      },
      Deadline::after(kPatience));
}

}  // namespace lockstep::cli
