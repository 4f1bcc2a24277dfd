#include "lockstep/train/checkpoint/checkpoint_keeper.h"

#include <fmt/format.h>

#include <chrono>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/model/layout.h"

namespace lockstep {
namespace {

class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total) {}
  ~Stopwatch() {
    total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  double& total_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

TrainingState empty_snapshot(const CheckpointPolicy& policy, RunState state,
                             std::shared_ptr<const Tokenizer> tokenizer) {
  TrainingState snapshot;
  if (policy.save_every > 0) {
    const std::size_t size = ParameterLayout(state.settings.model).size();
    snapshot.parameters = FloatBuffer(size);
    snapshot.first_moment = FloatBuffer(size);
    snapshot.second_moment = FloatBuffer(size);
  }
  snapshot.run = std::move(state);
  snapshot.tokenizer = std::move(tokenizer);
  return snapshot;
}

std::uint64_t save_and_prune(const CheckpointPolicy& policy, const TrainingState& state) {
  const std::uint64_t bytes = save_checkpoint(policy.out, state);
  try {
    delete_old_checkpoints(policy.out, state.run.step, policy.keep_last, policy.known_bad);
  } catch (const Error& error) {  // one too many does no harm
    log(LogLevel::kWarning, "an old checkpoint stays: {}", error.message());
  }
  return bytes;
}

}  // namespace

CheckpointKeeper::CheckpointKeeper(CheckpointPolicy policy, RunState state,
                                   std::shared_ptr<const Tokenizer> tokenizer)
    : policy_(std::move(policy)),
      phases_(policy_.world_size),
      writer_(empty_snapshot(policy_, state, std::move(tokenizer)),
              [this](const TrainingState& snapshot) { return save_and_prune(policy_, snapshot); }),
      latest_step_(state.step) {}

bool CheckpointKeeper::due(std::int64_t step, bool stopping) const {
  const std::int64_t last = stopping ? step : policy_.last_step;
  return should_save_checkpoint(step, policy_.save_every, last) && step != latest_step_;
}

bool CheckpointKeeper::begin(std::int64_t step, bool final, Deadline deadline) {
  if (final || policy_.wait) {
    const Stopwatch stopwatch(stalled_seconds_);
    writer_.wait(deadline);
  }
  look_after_writer();
  if (phases_.request_save(step)) {
    latest_step_ = step;
    return true;
  }
  log(LogLevel::kWarning, "{} is skipped: {} is still being written", checkpoint_name(step),
      checkpoint_name(phases_.checkpoint_step()));
  return false;
}

void CheckpointKeeper::write(const Snapshot& snapshot) {
  LOCKSTEP_CHECK(phases_.start_writing());
  {
    const Stopwatch stopwatch(stalled_seconds_);
    writer_.snapshot().run.step = phases_.checkpoint_step();
    snapshot(writer_.snapshot());
  }
  writer_.start();
}

void CheckpointKeeper::after_step(std::int64_t step, bool stopping, const Snapshot& snapshot,
                                  Deadline deadline) {
  const bool final = stopping || step >= policy_.last_step;
  if (!due(step, stopping) || !begin(step, final, deadline)) return;
  worker_ready(0);
  write(snapshot);
}

void CheckpointKeeper::finish(Deadline deadline) {
  {
    const Stopwatch stopwatch(stalled_seconds_);
    writer_.wait(deadline);
  }
  look_after_writer();
  if (!error_.empty()) {
    throw Error(ErrorCode::kIo, "the last checkpoint could not be saved: " + error_);
  }
}

void CheckpointKeeper::look_after_writer() {
  const auto outcome = writer_.take_outcome();
  if (!outcome) return;
  error_ = outcome->error;
  if (error_.empty()) {
    phases_.complete();
    log(LogLevel::kInfo, "saved {} ({:.1f} MB in {:.2f} s behind training)",
        checkpoint_name(outcome->step), static_cast<double>(outcome->bytes) / 1e6,
        outcome->seconds);
  } else {
    log(LogLevel::kWarning, "{} could not be saved, earlier ones are untouched: {}",
        checkpoint_name(outcome->step), error_);
  }
  phases_.resume_training();
}

std::optional<ResumePoint> find_resume_point(const std::string& out, bool resume) {
  if (out.empty()) {
    if (resume) throw Error(ErrorCode::kInvalidArgument, "--resume needs --out");
    return std::nullopt;
  }
  if (!resume) {
    const auto steps = list_checkpoints(out);
    if (steps.empty()) return std::nullopt;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} has checkpoints, up to {}: --resume goes on from them; a new run "
                            "needs another --out",
                            out, checkpoint_name(steps[0])));
  }
  auto newest = load_newest_checkpoint(out);
  remove_temporaries(out);
  if (!newest) {
    log(LogLevel::kInfo, "{} has no checkpoint yet: the run begins with step 1", out);
    return std::nullopt;
  }
  log(LogLevel::kInfo, "resuming from {}", checkpoint_path(out, newest->state.run.step));
  return ResumePoint{std::move(newest->state), std::move(newest->damaged)};
}

void require_same_run(const RunState& saved, const RunState& now) {
  const Differences differences = compare(saved, now);
  if (!differences.forbidden.empty()) {
    std::string text;
    for (const std::string& line : differences.forbidden) {
      text += (text.empty() ? "" : "; ") + line;
    }
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--resume: this is not the run that was saved: {}; --init starts a new "
                            "one from its weights",
                            text));
  }
  for (const std::string& line : differences.noted) {
    log(LogLevel::kWarning, "resumed with a change, so the result will be another: {}", line);
  }
}

}  // namespace lockstep
