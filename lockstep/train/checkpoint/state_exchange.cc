#include "lockstep/train/checkpoint/state_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"

namespace lockstep {
namespace {

std::vector<std::size_t> shard_sizes(Trainer& trainer) {
  std::vector<std::size_t> sizes;
  const int ranks = trainer.communicator().world_size();
  for (int rank = 0; rank < ranks; ++rank) {
    sizes.push_back(shard_range(trainer.layout().size(), rank, ranks).size());
  }
  return sizes;
}

// Rank 0's text, on all.
std::string broadcast_text(Communicator& communicator, const std::string& own) {
  auto size = static_cast<std::int64_t>(own.size());
  const CallOptions patient = {.deadline = Deadline::after(kDiskPatience)};
  communicator.broadcast(std::span(&size, 1), 0, patient);
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(size));
  if (communicator.rank() == 0) std::ranges::copy(own, bytes.begin());
  communicator.broadcast(std::span(bytes), 0, patient);
  return {bytes.begin(), bytes.end()};
}

// Residuals belong to the lanes of a rank, so with another number of workers they mean nothing.
void restore_residual(Trainer& trainer, const TrainingState* state) {
  const std::span<float> own = trainer.reducer().residual();
  if (own.empty()) return;
  Communicator& communicator = trainer.communicator();
  std::span<const float> all;
  if (state != nullptr) all = state->residuals.span();
  std::int64_t fits =
      all.size() == own.size() * static_cast<std::size_t>(communicator.world_size());
  communicator.broadcast(std::span(&fits, 1), 0);
  if (fits != 0) {
    communicator.scatter(all, own, 0);
  } else if (communicator.rank() == 0) {
    log(LogLevel::kWarning,
        "the residuals of bf16 gradients restart at zero: they were of another number of workers");
  }
}

void collect_residuals(Trainer& trainer, TrainingState* snapshot) {
  const std::span<const float> own = trainer.reducer().residual();
  if (own.empty()) return;
  Communicator& communicator = trainer.communicator();
  std::span<float> all;
  if (snapshot != nullptr) {
    const auto size = own.size() * static_cast<std::size_t>(communicator.world_size());
    if (snapshot->residuals.size() != size) snapshot->residuals = FloatBuffer(size);
    all = snapshot->residuals.span();
  }
  communicator.gather(own, all, 0);
}

}  // namespace

SharedResume share_resume_point(Communicator& communicator,
                                const std::function<std::optional<ResumePoint>()>& find) {
  // One letter and what belongs to it: n(one), a state, an error of the usage or of the files.
  SharedResume resume;
  std::string text = "n";
  if (communicator.rank() == 0) {
    try {
      resume.point = find();
      if (resume.point) text = fmt::format("s{}", to_json(resume.point->state.run));
    } catch (const Error& error) {
      text = error.code() == ErrorCode::kInvalidArgument ? 'u' : 'f';
      text += error.message();
    }
  }
  text = broadcast_text(communicator, text);
  const std::string rest = text.substr(1);
  switch (text[0]) {
    case 'u': throw Error(ErrorCode::kInvalidArgument, rest);
    case 'f': throw Error(ErrorCode::kIo, rest);
    case 's': resume.run = std::get<RunState>(parse_run_state(rest)); break;
    default: break;
  }
  return resume;
}

RunState run_state_of(const TrainerOptions& options, const Samples& training) {
  RunState run;
  run.settings = {.model = options.model,
                  .precision = options.precision,
                  .global_batch = options.global_batch,
                  .micro_batch = options.micro_batch,
                  .adamw = options.adamw,
                  .schedule = options.schedule,
                  .clip = options.clip,
                  .seed = options.seed,
                  .reduction = std::string(to_string(options.reducer.reduction)),
                  .wire_dtype = std::string(to_string(options.reducer.wire))};
  run.data = {training.size(), to_hex(training.fingerprint())};
  run.skipped_lanes = options.skip_lanes;
  run.versions = these_versions();
  return run;
}

void restore_state(Trainer& trainer, SharedResume& resume, const RunState& now) {
  require_same_run(*resume.run, now);
  Communicator& communicator = trainer.communicator();
  Replica& replica = trainer.replica();
  trainer.set_steps_done(resume.run->step);
  TrainingState* state = resume.point ? &resume.point->state : nullptr;
  if (state != nullptr) replica.set_parameters(state->parameters.span());
  FloatBuffer moments[2] = {FloatBuffer(replica.shard().size()),
                            FloatBuffer(replica.shard().size())};
  for (int i = 0; i < 2; ++i) {
    std::span<const float> all;
    if (state != nullptr) all = (i == 0 ? state->first_moment : state->second_moment).span();
    if (trainer.options().reducer.shard) {
      communicator.scatter(all, moments[i].span(), 0, shard_sizes(trainer));
    } else {
      std::ranges::copy(all, moments[i].data());
      communicator.broadcast(moments[i].span(), 0);
    }
  }
  replica.set_moments(moments[0].span(), moments[1].span());
  restore_residual(trainer, state);
  if (state != nullptr) *state = {};  // its memory is wanted elsewhere
}

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
  const auto gather = [&](const FloatBuffer& own, FloatBuffer TrainingState::*all) {
    const std::span<float> out = snapshot != nullptr ? (snapshot->*all).span() : std::span<float>();
    trainer.communicator().gather(std::span<const float>(own.span()), out, 0, shard_sizes(trainer));
  };
  gather(first, &TrainingState::first_moment);
  gather(second, &TrainingState::second_moment);
}

RunCheckpoints::RunCheckpoints(Trainer& trainer, const CheckpointPolicy& policy,
                               const RunState& run, std::shared_ptr<const Tokenizer> tokenizer)
    : trainer_(trainer), policy_(policy), latest_step_(run.step) {
  if (trainer.communicator().rank() == 0) keeper_.emplace(policy, run, std::move(tokenizer));
}

// Rank 0 alone knows whether it still writes.
bool RunCheckpoints::agree_to_save(std::int64_t step, bool final) {
  std::int64_t agreed = -1;
  if (keeper_ && keeper_->begin(step, final, Deadline::after(kDiskPatience))) agreed = step;
  trainer_.communicator().broadcast(std::span(&agreed, 1), 0,
                                    {.deadline = Deadline::after(kDiskPatience)});
  return agreed == step;
}

void RunCheckpoints::after_step(bool stopping) {
  const std::int64_t step = trainer_.steps_done();
  const std::int64_t last = stopping ? step : policy_.last_step;
  if (step == latest_step_ || !should_save_checkpoint(step, policy_.save_every, last)) return;
  latest_step_ = step;
  if (!agree_to_save(step, step >= last)) return;
  trainer_.verify();  // throws on all before anything is written
  if (!keeper_) {
    collect_state(trainer_, nullptr);
    return;
  }
  for (std::uint32_t rank = 0; rank < policy_.world_size; ++rank) keeper_->worker_ready(rank);
  keeper_->write([&](TrainingState& snapshot) { collect_state(trainer_, &snapshot); });
}

void RunCheckpoints::finish() {
  after_step(true);
  if (keeper_) keeper_->finish(Deadline::after(kDiskPatience));
}

}  // namespace lockstep
