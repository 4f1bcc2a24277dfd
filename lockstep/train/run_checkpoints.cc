#include "lockstep/train/run_checkpoints.h"

#include <gnu/libc-version.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/base/log.h"
#include "lockstep/base/processor.h"
#include "lockstep/base/version.h"
#include "lockstep/files/json.h"
#include "lockstep/train/agreement.h"
#include "lockstep/train/checkpoint/folders.h"

namespace lockstep {
namespace {

void allocate(TrainingState& state, std::size_t size) {
  for (FloatBuffer* buffer : {&state.parameters, &state.first_moment, &state.second_moment}) {
    if (buffer->size() != size) *buffer = FloatBuffer(size);
  }
}

// A state with buffers for a snapshot, unless there may never be one.
TrainingState state_to_fill(const Trainer& trainer, const CheckpointPolicy& policy,
                            std::shared_ptr<const Tokenizer> tokenizer) {
  TrainingState state;
  state.run = run_state_of(trainer);
  state.tokenizer = std::move(tokenizer);
  if (policy.regular()) allocate(state, trainer.layout().size());
  return state;
}

void collect_residuals(Trainer& trainer, TrainingState* snapshot) {
  const std::span<const float> own = trainer.reducer().residual();
  if (own.empty()) return;
  Communicator& communicator = trainer.communicator();
  std::span<float> all;
  if (snapshot != nullptr) {
    const std::size_t size = own.size() * index_of(communicator.world_size());
    if (snapshot->residuals.size() != size) snapshot->residuals = FloatBuffer(size);
    all = snapshot->residuals.span();
  }
  communicator.gather(own, all, 0);
}

// Weights, moments and residuals of the run into `snapshot`, which only rank 0 has. Collective.
void collect_state(Trainer& trainer, TrainingState* snapshot) {
  const PhaseTimer timer(trainer.phases(), Phase::kSave);
  collect_residuals(trainer, snapshot);
  Replica& replica = trainer.replica();
  if (snapshot != nullptr) replica.get_parameters(snapshot->parameters.span());
  if (!trainer.options().reducer.shard) {
    if (snapshot != nullptr) {
      replica.get_moments(snapshot->first_moment.span(), snapshot->second_moment.span());
    }
    return;
  }
  FloatBuffer first(replica.shard().size());
  FloatBuffer second(replica.shard().size());
  replica.get_moments(first.span(), second.span());
  Communicator& communicator = trainer.communicator();
  const Range own = trainer.reducer().shard();  // buddies hold each other's, too
  const auto gather = [&](const FloatBuffer& held, FloatBuffer TrainingState::*all) {
    const std::span<float> out = snapshot != nullptr ? (snapshot->*all).span() : std::span<float>();
    const std::span<const float> values(held.span());
    communicator.gather(values.subspan(own.begin - replica.shard().begin, own.size()), out, 0,
                        shard_sizes(trainer.layout().size(), communicator.world_size()));
  };
  gather(first, &TrainingState::first_moment);
  gather(second, &TrainingState::second_moment);
}

}  // namespace

bool should_save_checkpoint(std::int64_t step, std::int64_t save_every, std::int64_t last_step) {
  if (save_every == 0) return false;
  return (step > 0 && step % save_every == 0) || step >= last_step;
}

RunState run_state_of(const Trainer& trainer) {
  const TrainerOptions& options = trainer.options();
  RunState run;
  run.step = trainer.steps_done();
  run.validation = trainer.validation();
  run.settings = {.model = options.model,
                  .precision = options.precision,
                  .global_batch = options.global_batch,
                  .micro_batch = options.micro_batch,
                  .adamw = options.adamw,
                  .schedule = options.schedule,
                  .clip = options.clip,
                  .seed = options.seed,
                  .reduction = options.outside != nullptr
                                   ? "outside"
                                   : std::string(to_string(options.reducer.reduction)),
                  .wire_dtype = std::string(to_string(options.reducer.wire))};
  run.data = {trainer.training().size(), to_hex(trainer.training().fingerprint()),
              to_hex(trainer.validation_samples().fingerprint()), trainer.lanes().mix};
  run.skipped_lanes = options.skip_lanes;
  run.versions = {std::string(version()), ::gnu_get_libc_version(), std::string(processor_level()),
                  options.gpu};
  return run;
}

RunCheckpoints::RunCheckpoints(Trainer& trainer, const CheckpointPolicy& policy,
                               std::shared_ptr<const Tokenizer> tokenizer)
    : trainer_(trainer),
      policy_(policy),
      tokenizer_(std::move(tokenizer)),
      latest_step_(trainer.steps_done()),
      damaged_(policy.damaged) {
  if (trainer.attached() && trainer.communicator().rank() == 0) make_writer();
}

void RunCheckpoints::make_writer() {
  writer_.emplace(state_to_fill(trainer_, policy_, tokenizer_),
                  [this](const TrainingState& state) { return save_and_prune(state); });
}

std::uint64_t RunCheckpoints::save_and_prune(const TrainingState& state) {
  const std::uint64_t bytes = save_checkpoint(policy_.out, state, policy_.guard, *policy_.storage);
  if (policy_.saved) policy_.saved(checkpoint_path(policy_.out, state.run.step));
  try {
    std::vector<std::int64_t> spared = damaged();
    spared.push_back(state.run.validation.best_step);
    delete_old_checkpoints(policy_.out, state.run.step, policy_.keep_last, spared, policy_.guard,
                           *policy_.storage);
  } catch (const Error& error) {  // one too many does no harm
    log(LogLevel::kWarning, "an old checkpoint stays: {}", error.message());
  }
  return bytes;
}

std::vector<std::int64_t> RunCheckpoints::damaged() const {
  const std::lock_guard lock(mutex_);
  return damaged_;
}

void RunCheckpoints::spare(std::span<const std::int64_t> damaged) {
  const std::lock_guard lock(mutex_);
  damaged_.insert(damaged_.end(), damaged.begin(), damaged.end());
  std::ranges::sort(damaged_);
  damaged_.erase(std::unique(damaged_.begin(), damaged_.end()), damaged_.end());
}

// Newcomers were not there when the files were read.
void RunCheckpoints::share_damaged() {
  const auto parse = [](const std::string& text) {
    return wholes<std::int64_t>(parse_json(text), 0);
  };
  const std::string own = to_text(Json(damaged()));
  for (const auto& steps :
       gather_parsed(trainer_.communicator(), own, "its damaged checkpoints", parse)) {
    spare(steps);
  }
}

bool RunCheckpoints::writes() const {
  return writer_ && trainer_.attached() && trainer_.communicator().rank() == 0;
}

void RunCheckpoints::regroup() {
  Communicator& communicator = trainer_.communicator();
  if (writer_) {
    writer_->cancel();
    writer_->log_outcome();
  }
  if (!writes() || writer_->last_failed()) copied_step_ = 0;
  const std::array<std::int64_t, 3> own = {due_step_, copied_step_, latest_step_};
  std::vector<std::int64_t> all(own.size() * index_of(communicator.world_size()));
  communicator.all_gather(std::span<const std::int64_t>(own), std::span(all));
  std::int64_t due = 0;
  std::int64_t copied = 0;
  std::int64_t latest = latest_step_;
  for (std::size_t i = 0; i < all.size(); i += own.size()) {
    due = std::max(due, all[i]);
    copied = std::max(copied, all[i + 1]);
    latest = std::min(latest, all[i + 2]);
  }
  std::int64_t lost = 0;
  if (communicator.rank() == 0) {
    if (!writer_) make_writer();
    lost = due > copied && !policy_.storage->find_folder(checkpoint_path(policy_.out, due)) ? 1 : 0;
  }
  communicator.broadcast(std::span(&lost, 1), 0, {.deadline = Deadline::after(kDiskPatience)});
  lost_ = lost != 0;
  due_step_ = due;
  latest_step_ = lost_ ? -1 : due > 0 ? due : latest;
  share_damaged();
}

// Rank 0 alone knows whether it is still writing.
bool RunCheckpoints::agree_to_save(std::int64_t step, bool wait) {
  std::int64_t agreed = -1;
  if (writes() && writer_->request_save(step, wait, Deadline::after(kDiskPatience))) {
    agreed = step;
  }
  trainer_.communicator().broadcast(std::span(&agreed, 1), 0,
                                    {.deadline = Deadline::after(kDiskPatience)});
  return agreed == step;
}

void RunCheckpoints::after_step(const SaveReasons& reasons) {
  if (writer_) writer_->log_outcome();
  const std::int64_t step = trainer_.steps_done();
  const bool last = policy_.regular() && step >= policy_.last_step;
  const bool best = policy_.regular() && reasons.best;
  const bool due = reasons.stopping || reasons.requested || best || last || lost_ ||
                   should_save_checkpoint(step, policy_.save_every, policy_.last_step);
  if (step == latest_step_ || policy_.out.empty() || !due) return;
  const std::int64_t before = std::exchange(due_step_, step);
  latest_step_ = step;
  latest_save_ = std::chrono::steady_clock::now();
  trainer_.at("save", step);
  if (!agree_to_save(step, reasons.stopping || best || last || lost_ || policy_.wait)) {
    due_step_ = before;
    return;
  }
  trainer_.verify();  // throws on all ranks before anything is written
  if (writes()) {
    writer_->write([&](TrainingState& snapshot) { take_snapshot(snapshot); });
    copied_step_ = step;
  } else {
    collect_state(trainer_, nullptr);
  }
  lost_ = false;
}

void RunCheckpoints::take_snapshot(TrainingState& snapshot) {
  allocate(snapshot, trainer_.layout().size());
  snapshot.run.validation = trainer_.validation();
  collect_state(trainer_, &snapshot);
}

void RunCheckpoints::finish(bool stopping) {
  after_step({.stopping = stopping});
  if (writes()) writer_->finish(Deadline::after(kDiskPatience));
}

void RunCheckpoints::wait() {
  if (writer_) writer_->wait(Deadline::after(kDiskPatience));
}

bool RunCheckpoints::save_wanted() const {
  if (!writes()) return false;
  const auto since = std::chrono::steady_clock::now() - latest_save_;
  if (writer_->last_failed() && since >= policy_.retry) return true;
  return policy_.interval.count() > 0 && since >= policy_.interval;
}

}  // namespace lockstep
