#include "lockstep/train/resume.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <optional>
#include <utility>
#include <variant>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/base/log.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/json.h"
#include "lockstep/files/lease.h"
#include "lockstep/train/agreement.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/run_checkpoints.h"

namespace lockstep {
namespace {

// The files of a run in its folder, beside checkpoints.
constexpr std::initializer_list<const char*> kOurFiles = {
    kWeightsFile,   kConfigFile, kSentencePieceFile, kBpeFile,
    kBpeConfigFile, kRunFile,    kMetricsFile,       kHaltFile};

[[noreturn]] void refuse_folder(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

// One of our files that was being written when its process ended: NAME.TAG.tmp. Who is just trying
// to get the lease tries again.
bool is_unfinished(const std::string& name) {
  const auto is_of = [&](const std::string& ours) { return name.starts_with(ours + "."); };
  return name.ends_with(".tmp") && (is_of(kLeaseFile) || std::ranges::any_of(kOurFiles, is_of));
}

bool is_ours(const std::string& name) {
  return name.starts_with("checkpoint-") || name.starts_with(kLeaseFile) || is_unfinished(name) ||
         name == kTensorBoardFolder || name == kFlightFolderOfRun ||
         std::ranges::find(kOurFiles, name) != kOurFiles.end();
}

// For a run that begins where it was to go on.
void require_nothing_to_lose(const std::string& out, Storage& storage) {
  const auto folder = storage.open_folder(out);
  const bool begun = folder->has(kRunFile);
  if (folder->has(kWeightsFile)) {
    refuse_folder(
        begun ? fmt::format("the run in {} is finished, and there is no checkpoint to go on from: "
                            "--init {} starts a new one from its weights",
                            out, out)
              : fmt::format("{} has a model, and no checkpoint to go on from: --init {} starts a "
                            "run from its weights, with another --out",
                            out, out));
  }
  if (begun) return;
  for (const Folder::Entry& entry : folder->entries()) {
    if (is_ours(entry.name)) continue;
    refuse_folder(
        fmt::format("{} has other files ({}), and no run to go on with: a run needs a folder of "
                    "its own for --out",
                    out, entry.name));
  }
}

void require_free(const std::string& out, Storage& storage) {
  if (const auto steps = list_checkpoints(out, storage); !steps.empty()) {
    refuse_folder(
        fmt::format("{} has checkpoints, up to {}: --resume goes on from them; a new run "
                    "needs another --out, or --overwrite",
                    out, checkpoint_name(steps[0])));
  }
  const auto folder = storage.open_folder(out);
  if (folder->has(kWeightsFile)) {
    refuse_folder(
        fmt::format("{} has a model already: a new run needs another --out, or --overwrite", out));
  }
  for (const Folder::Entry& entry : folder->entries()) {
    if (is_ours(entry.name)) continue;
    refuse_folder(
        fmt::format("{} has other files ({}): a run needs a folder of its own for --out; "
                    "--overwrite writes among them all the same",
                    out, entry.name));
  }
}

// What runs that ended were writing.
void remove_unfinished(const std::string& out, const WriteGuard& guard, Storage& storage) {
  remove_temporaries(out, guard, storage);
  const auto folder = storage.open_folder(out);
  for (const Folder::Entry& entry : folder->entries()) {
    if (!is_unfinished(entry.name) || entry.kind != Folder::Kind::kFile) continue;
    guard.require(folder->path_of(entry.name));
    folder->remove(entry.name);
  }
}

void remove_earlier_run(const std::string& out, const WriteGuard& guard, Storage& storage) {
  const auto folder = storage.open_folder(out);
  for (const std::int64_t step : list_checkpoints(out, storage)) {
    const std::string name = checkpoint_name(step);
    const std::string going = guard.temporary(name);
    guard.require(folder->path_of(name));
    remove_flat_folder(*folder, going);
    folder->rename(name, going);
  }
  folder->sync();
  const auto remove_folder = [&](Folder& above, const std::string& name) {
    guard.require(above.path_of(name));
    remove_flat_folder(above, name);
  };
  remove_folder(*folder, kTensorBoardFolder);
  if (const auto flight = folder->find_folder(kFlightFolderOfRun)) {
    for (const Folder::Entry& entry : flight->entries()) remove_folder(*flight, entry.name);
  }
  remove_folder(*folder, kFlightFolderOfRun);
  for (const char* name : kOurFiles) {
    guard.require(folder->path_of(name));
    folder->remove(name);
  }
  remove_unfinished(out, guard, storage);
}

// On rank 0.
ResumePoint look_into(const std::string& out, FolderUse use, const std::function<void()>& hold,
                      const WriteGuard& guard, Storage& storage) {
  ResumePoint point;
  if (out.empty()) {
    if (use == FolderUse::kResume) refuse_folder("--resume needs --out");
    return point;
  }
  make_folder(out, storage);
  if (hold) hold();
  if (use == FolderUse::kNew) require_free(out, storage);
  if (use == FolderUse::kOverwrite) remove_earlier_run(out, guard, storage);
  if (use != FolderUse::kResume) return point;
  auto newest = load_newest_checkpoint(out, storage);
  remove_unfinished(out, guard, storage);
  if (!newest) {
    require_nothing_to_lose(out, storage);
    log(LogLevel::kInfo, "{} has no checkpoint yet: the run begins with step 1", out);
    return point;
  }
  log(LogLevel::kInfo, "resuming from {}", checkpoint_path(out, newest->state.run.step));
  point.run = newest->state.run;
  point.tokenizer = newest->state.tokenizer;
  point.state = std::move(newest->state);
  point.damaged = std::move(newest->damaged);
  return point;
}

std::optional<std::vector<std::int64_t>> parse_steps(const std::string& text) {
  return wholes<std::int64_t>(parse_json(text), 0);
}

// As `root` has told it.
RunState told_run_state(Communicator& communicator, const std::string& text, int root) {
  const auto parsed = parse_run_state(text);
  if (const auto* run = std::get_if<RunState>(&parsed)) return *run;
  refuse_telling(communicator, root, "the state of the run");
}

// Of a tokenizer's file, at most.
constexpr std::int64_t kMostBroadcast = std::int64_t{1} << 30;

// The root's text, on all ranks.
std::string broadcast_text(Communicator& communicator, const std::string& own, int root = 0) {
  auto size = static_cast<std::int64_t>(own.size());
  const CallOptions patient = {.deadline = Deadline::after(kDiskPatience)};
  communicator.broadcast(std::span(&size, 1), root, patient);
  if (size < 0 || size > kMostBroadcast) {
    refuse_telling(communicator, root, fmt::format("a text of {} bytes", size));
  }
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(size));
  if (communicator.rank() == root) std::ranges::copy(own, bytes.begin());
  communicator.broadcast(std::span(bytes), root, patient);
  return {bytes.begin(), bytes.end()};
}

// Rank 0's, on all ranks: any of them may be rank 0 later.
std::vector<std::int64_t> told_steps(Communicator& communicator,
                                     const std::vector<std::int64_t>& own) {
  auto steps = parse_steps(broadcast_text(communicator, to_text(Json(own))));
  if (!steps) refuse_telling(communicator, 0, "its damaged checkpoints");
  return std::move(*steps);
}

// What `work` gives on rank 0, or throws there, on all ranks.
std::string told_by_first(Communicator& communicator, const std::function<std::string()>& work) {
  // One letter and what belongs to it: a text, or an error of usage or of files.
  std::string text;
  if (communicator.rank() == 0) {
    try {
      text = "t" + work();
    } catch (const Error& error) {
      text = error.code() == ErrorCode::kInvalidArgument ? 'u' : 'f';
      text += error.message();
    }
  }
  text = broadcast_text(communicator, text);
  if (text.empty()) refuse_telling(communicator, 0, "nothing");
  std::string rest = text.substr(1);
  switch (text[0]) {
    case 'u': throw Error(ErrorCode::kInvalidArgument, rest);
    case 'f': throw Error(ErrorCode::kIo, rest);
    default: return rest;
  }
}

// Rank 0's tokenizer, on all ranks: its kind, and its two files where it has them.
void share_tokenizer(Communicator& communicator, std::shared_ptr<const Tokenizer>& tokenizer) {
  auto kind = static_cast<std::int32_t>(tokenizer ? tokenizer->kind() : TokenizerKind::kUnknown);
  communicator.broadcast(std::span(&kind, 1), 0, {.deadline = Deadline::after(kDiskPatience)});
  std::vector<TokenizerFile> files;
  if (tokenizer) files = tokenizer->files();
  files.resize(2);
  for (TokenizerFile& file : files) file.bytes = broadcast_text(communicator, file.bytes);
  if (communicator.rank() == 0) return;
  tokenizer = tokenizer_of_files(static_cast<TokenizerKind>(kind), std::move(files[0].bytes),
                                 std::move(files[1].bytes), "the checkpoint's tokenizer");
}

void require_same_run(const RunState& saved, const RunState& now) {
  const Differences differences = compare(saved, now);
  if (!differences.forbidden.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--resume: this is not the run that was saved: {}; --init starts a new "
                            "one from its weights",
                            fmt::join(differences.forbidden, "; ")));
  }
  for (const std::string& line : differences.noted) {
    log(LogLevel::kWarning, "resumed with a change, so the result will be different: {}", line);
  }
}

void restore_moments(Trainer& trainer, const TrainingState* state, int root) {
  Communicator& communicator = trainer.communicator();
  Replica& replica = trainer.replica();
  const auto restored = [&](FloatBuffer TrainingState::*moment) {
    FloatBuffer held(replica.shard().size());
    std::span<const float> all;
    if (state != nullptr) all = (state->*moment).span();
    if (trainer.options().reducer.shard) {
      const Range own = trainer.reducer().shard();
      communicator.scatter(all, held.span().subspan(own.begin - replica.shard().begin, own.size()),
                           root, shard_sizes(trainer.layout().size(), communicator.world_size()));
      trainer.reducer().complete_held(held.span());
    } else {
      std::ranges::copy(all, held.data());
      communicator.broadcast(held.span(), root);
    }
    return held;
  };
  const FloatBuffer first = restored(&TrainingState::first_moment);
  const FloatBuffer second = restored(&TrainingState::second_moment);
  replica.set_moments(first.span(), second.span());
}

// Residuals belong to the lanes of a rank: with another number of workers they mean nothing.
void restore_residual(Trainer& trainer, const TrainingState* state, int root) {
  const std::span<float> own = trainer.reducer().residual();
  if (own.empty()) return;
  Communicator& communicator = trainer.communicator();
  std::span<const float> all;
  if (state != nullptr) all = state->residuals.span();
  std::int64_t fits = all.size() == own.size() * index_of(communicator.world_size());
  communicator.broadcast(std::span(&fits, 1), root);
  if (fits != 0) {
    communicator.scatter(all, own, root);
  } else if (communicator.rank() == 0) {
    log(LogLevel::kWarning,
        "the residuals of bf16 gradients restart at zero: they were of another number of workers");
  }
}

}  // namespace

ResumePoint find_resume_point(Communicator& communicator, const std::string& out, FolderUse use,
                              const std::function<void()>& hold, const WriteGuard& guard,
                              Storage& storage) {
  ResumePoint point;
  const std::string run = told_by_first(communicator, [&]() -> std::string {
    point = look_into(out, use, hold, guard, storage);
    return point.run ? to_json(*point.run) : "";
  });
  if (run.empty()) return point;
  point.run = told_run_state(communicator, run, 0);
  share_tokenizer(communicator, point.tokenizer);
  point.damaged = told_steps(communicator, point.damaged);
  return point;
}

void check_folder_is_free(Communicator& communicator, const std::string& out, Storage& storage) {
  told_by_first(communicator, [&]() -> std::string {
    if (!out.empty() && storage.find_folder(out)) require_free(out, storage);
    return "";
  });
}

ResumePoint find_newest_checkpoint(Communicator& communicator, const std::string& out) {
  std::vector<std::int64_t> own;
  if (!out.empty()) own = list_checkpoints(out);
  struct Place {
    std::int64_t step;
    int rank;
  };
  std::vector<Place> places;
  int rank = 0;
  for (const auto& steps :
       gather_parsed(communicator, to_text(Json(own)), "its checkpoints", parse_steps)) {
    for (const std::int64_t step : steps) places.push_back({step, rank});
    ++rank;
  }
  std::ranges::stable_sort(places, std::ranges::greater(), &Place::step);
  std::vector<std::int64_t> damaged;
  for (const Place& place : places) {
    ResumePoint point;
    point.root = place.rank;
    std::string text = "n";
    if (communicator.rank() == place.rank) {
      const std::string path = checkpoint_path(out, place.step);
      try {
        point.state = load_checkpoint(path);
        text = "s" + to_json(point.state->run);
      } catch (const Error& error) {
        log(LogLevel::kWarning, "{} cannot be read: {}", path, error.message());
      }
    }
    text = broadcast_text(communicator, text, place.rank);
    if (!text.starts_with('s')) {
      damaged.push_back(place.step);
      continue;
    }
    point.run = told_run_state(communicator, text.substr(1), place.rank);
    point.damaged = std::move(damaged);
    return point;
  }
  return {};
}

void restore(Trainer& trainer, ResumePoint& point) {
  require_same_run(*point.run, run_state_of(trainer));
  trainer.set_steps_done(point.run->step);
  trainer.set_validation(point.run->validation);
  const TrainingState* state = point.state ? &*point.state : nullptr;
  if (state != nullptr) trainer.replica().set_parameters(state->parameters.span());
  if (point.root != 0) {  // start() takes them from rank 0
    trainer.replica().complete_parameters([&](std::span<float> parameters) {
      trainer.communicator().broadcast(parameters, point.root);
    });
  }
  restore_moments(trainer, state, point.root);
  restore_residual(trainer, state, point.root);
  point.state.reset();  // its memory is needed elsewhere
}

}  // namespace lockstep
