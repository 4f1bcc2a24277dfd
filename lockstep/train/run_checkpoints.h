#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/files/atomic_file.h"
#include "lockstep/train/checkpoint/writer.h"
#include "lockstep/train/trainer.h"

namespace lockstep {

// The files of a run in its folder, beside the model's and the checkpoints.
constexpr const char* kRunFile = "run.json";  // the command's options, for --resume
constexpr const char* kMetricsFile = "metrics.jsonl";
constexpr const char* kHaltFile = "halt.json";
constexpr const char* kTensorBoardFolder = "tensorboard";  // event files
constexpr const char* kFlightFolderOfRun = "flight";       // what workers did last

// A disk that takes longer than this for one checkpoint is given up.
constexpr auto kDiskPatience = std::chrono::hours(1);

struct CheckpointPolicy {
  std::string out = {};  // empty: nothing is ever saved
  // Steps or time between checkpoints; 0: not so. With one of them also after the last step and
  // after every validation that is the best so far; with neither only when a run is stopped, is
  // halted or is asked to save.
  std::int64_t save_every = 0;
  std::chrono::nanoseconds interval = {};
  std::int64_t keep_last = 3;  // and the one of the best validation; 0: all
  bool wait = false;           // for every write, so that no save is skipped
  std::int64_t last_step = 0;
  std::vector<std::int64_t> damaged = {};  // steps of checkpoints that could not be read
  // Told the path of every checkpoint that is on disk, on the writer's thread.
  std::function<void(const std::string& path)> saved = {};
  WriteGuard guard = {};  // of `out`
  Storage* storage = &disk();
  // After a save that failed, as on a full disk, the next one is not waited for but tried so soon.
  std::chrono::nanoseconds retry = std::chrono::minutes(1);

  bool regular() const { return save_every > 0 || interval.count() > 0; }
};

// Why a step may be saved, the same on all ranks.
struct SaveReasons {
  bool stopping = false;   // no step follows, though the schedule has more
  bool requested = false;  // by some rank
  bool best = false;       // the validation after it is the best so far
};

// Whether a checkpoint is due after `step` steps: every `save_every`, and after the last. Pure.
bool should_save_checkpoint(std::int64_t step, std::int64_t save_every, std::int64_t last_step);

// What a checkpoint records of the trainer's run, at the step where it stands.
RunState run_state_of(const Trainer& trainer);

// Saves the checkpoints of a run. The ranks agree on the step and compare the hashes of their
// weights before anything is written. Shards of the moments are gathered on rank 0, which alone
// writes, while all train on: the disk need not be shared. All calls are collective. It outlives
// generations, as the trainer does.
class RunCheckpoints {
 public:
  // On rank 0 memory for a copy of the state is allocated now if checkpoints are regular. The
  // trainer must outlive this. It may be detached; then regroup() comes next.
  RunCheckpoints(Trainer& trainer, const CheckpointPolicy& policy,
                 std::shared_ptr<const Tokenizer> tokenizer);

  // In a new generation, after level(). Who is rank 0 now writes. A checkpoint that was due when
  // the last generation ended, and that rank 0 neither is writing nor sees on disk, is saved by the
  // next after_step(), whatever step that is. A rank that is not 0 any more comes to the end of
  // what it is writing, or to the guard's refusal, and nobody minds.
  void regroup();
  // After every step. Saves if a checkpoint is due. It is skipped, with a warning, while the one
  // before is still being written; the last one and that of the best validation wait. Throws
  // Error{kReplicaMismatch} on all ranks when their weights differ.
  void after_step(const SaveReasons& reasons);
  // After the last step: saves what is due unless this step is saved, and waits on rank 0 until the
  // files are on disk. `stopping` as above. Throws Error{kIo} there when that failed.
  void finish(bool stopping);

  // Checkpoints of these steps are damaged, too: they neither count nor are deleted. For rank 0 to
  // know it in a later generation any rank may be told.
  void spare(std::span<const std::int64_t> damaged);

  // Not collective, also while detached: waits until what this rank is writing is on disk, or
  // cannot be written.
  void wait();

  // On rank 0: the interval has passed since the last save, or the last one failed and it is time
  // to try again. The rank then requests one of all.
  bool save_wanted() const;

  // What rank 0 is doing; kTraining on the others.
  CheckpointPhase phase() const { return writer_ ? writer_->phase() : CheckpointPhase::kTraining; }

 private:
  bool writes() const;
  void make_writer();
  std::uint64_t save_and_prune(const TrainingState& state);
  std::vector<std::int64_t> damaged() const;
  void share_damaged();
  bool agree_to_save(std::int64_t step, bool wait);
  void take_snapshot(TrainingState& snapshot);

  Trainer& trainer_;
  const CheckpointPolicy policy_;
  std::chrono::steady_clock::time_point latest_save_ = std::chrono::steady_clock::now();
  const std::shared_ptr<const Tokenizer> tokenizer_;
  std::int64_t latest_step_;      // for which a save was due, or from which we resumed
  std::int64_t due_step_ = 0;     // the last that was due; 0: none
  std::int64_t copied_step_ = 0;  // the last whose state is with the writer; 0: none
  mutable std::mutex mutex_;
  std::vector<std::int64_t> damaged_;       // guarded by mutex_; the writer's thread reads it
  bool lost_ = false;                       // a save was lost with its generation: one is due
  std::optional<CheckpointWriter> writer_;  // where this rank is 0, or was
};

}  // namespace lockstep
