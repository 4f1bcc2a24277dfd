#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/files/atomic_file.h"
#include "lockstep/train/checkpoint/training_state.h"
#include "lockstep/train/formats/model_files.h"

namespace lockstep {

// Checkpoints on disk: OUT/checkpoint-STEP, each a folder that is complete or absent, as
// docs/checkpoint_format.md specifies. Failures of the file system are Error{kIo}.

std::string checkpoint_name(std::int64_t step);                          // checkpoint-500
std::string checkpoint_path(const std::string& out, std::int64_t step);  // OUT/checkpoint-500
// The step of a complete checkpoint; nothing for any other name.
std::optional<std::int64_t> parse_checkpoint_name(std::string_view name);
// Whether the name is that of a checkpoint being written or deleted: "checkpoint-500.tmp" or, where
// several processes may write, "checkpoint-500.TAG.tmp".
bool is_temporary_name(std::string_view name);

// Writes checkpoint-STEP. One of that name that is intact and the same stays as it is: another
// process of the run has saved it. Any other is moved to checkpoint-STEP.damaged. Returns the bytes
// written.
std::uint64_t save_checkpoint(const std::string& out, const TrainingState& state,
                              const WriteGuard& guard = {}, Storage& storage = disk());

// The steps of all checkpoints in a folder, newest first. Empty when there is no such folder.
std::vector<std::int64_t> list_checkpoints(const std::string& out, Storage& storage = disk());

TrainingState load_checkpoint(const std::string& folder, Storage& storage = disk());

struct NewestCheckpoint {
  TrainingState state;
  std::vector<std::int64_t> damaged;  // the steps of later checkpoints, which cannot be read
};
// The newest checkpoint whose hashes are right; warns of every later one. Nothing when there are no
// checkpoints. Throws when there are some and all are damaged.
std::optional<NewestCheckpoint> load_newest_checkpoint(const std::string& out,
                                                       Storage& storage = disk());

// The model in a folder that save_model() or save_checkpoint() wrote, or of Hugging Face: see
// read_model(). Where the folder has a manifest, the hashes of what is read are checked, and a file
// that is not listed there is refused.
SavedModel load_model(const std::string& folder, Storage& storage = disk());

// Which checkpoints to delete once that of step `saved` is complete. Spared ones, which are damaged
// or the best, neither count nor are deleted; later ones belong to another run and stay. keep_last
// 0 keeps all. Pure.
std::vector<std::int64_t> checkpoints_to_delete(std::span<const std::int64_t> steps,
                                                std::int64_t saved, std::int64_t keep_last,
                                                std::span<const std::int64_t> spared);
void delete_old_checkpoints(const std::string& out, std::int64_t saved, std::int64_t keep_last,
                            std::span<const std::int64_t> spared, const WriteGuard& guard = {},
                            Storage& storage = disk());
// Removes what interrupted saves and deletions have left. A symbolic link among them goes; what it
// leads to stays.
void remove_temporaries(const std::string& out, const WriteGuard& guard = {},
                        Storage& storage = disk());

}  // namespace lockstep
