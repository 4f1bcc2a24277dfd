#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/files/atomic_file.h"
#include "lockstep/files/storage.h"
#include "lockstep/train/checkpoint/training_state.h"
#include "lockstep/train/trainer.h"

namespace lockstep {

// From where a run goes on. Only one rank reads files; the others hear of them from it, so that no
// disk need be shared. All calls are collective.
struct ResumePoint {
  std::optional<RunState> run;  // as it was saved, on all ranks; none: the run is a new one
  std::shared_ptr<const Tokenizer> tokenizer;  // that of the checkpoint, on all ranks; may be none
  // Steps of later checkpoints, which could not be read; on all ranks.
  std::vector<std::int64_t> damaged;
  int root = 0;                        // the rank that has read the files
  std::optional<TrainingState> state;  // there, until restore() has taken it
};

// What a run does with what it finds in its folder.
enum class FolderUse {
  kNew,  // refuses a folder that has a model, checkpoints or anything that is not ours
  // Goes on from the newest intact checkpoint. A new run when there are none at all, which refuses
  // a folder that has a model, or other files and no run of ours.
  kResume,
  kOverwrite,  // a new run: removes our files of an earlier one, and nothing else
};

// Makes the folder `out` and looks into it, before anything is written. Throws on all ranks what
// rank 0 finds wrong: Error{kInvalidArgument} when the folder is refused or in use, Error{kIo} when
// no checkpoint is intact. Rank 0 calls `hold` before it looks: that keeps others out, and throws
// when another run has the folder. `guard` is asked before anything there is renamed or removed.
ResumePoint find_resume_point(Communicator& communicator, const std::string& out, FolderUse use,
                              const std::function<void()>& hold = {}, const WriteGuard& guard = {},
                              Storage& storage = disk());

// For a dry run: throws as a new run there would, and makes nothing.
void check_folder_is_free(Communicator& communicator, const std::string& out,
                          Storage& storage = disk());

// When level() has found no whole state: the newest intact checkpoint that any rank sees in `out`;
// point.run is not there when there is none. The run holds the folder.
ResumePoint find_newest_checkpoint(Communicator& communicator, const std::string& out);

// Before Trainer::start(), when point.run is there: sets the steps, the weights, and on every rank
// its moments and residuals. Takes point.state. Throws Error{kInvalidArgument} on all
// ranks when the trainer's run is not the one that was saved; warns when it is, but its result
// changes.
void restore(Trainer& trainer, ResumePoint& point);

}  // namespace lockstep
