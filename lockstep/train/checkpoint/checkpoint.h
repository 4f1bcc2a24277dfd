#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/train/checkpoint/checkpoint_files.h"

namespace lockstep {

// Checkpoints on disk: OUT/checkpoint-STEP, each a folder that is complete or not there at all.
// docs/checkpoint_format.md specifies it. Errors are Error{kIo}.

// Writes checkpoint-STEP. One of the same name that is there already, which then was damaged, is
// moved aside to checkpoint-STEP.damaged. Returns the bytes written.
std::uint64_t save_checkpoint(const std::string& out, const TrainingState& state);

// Steps of the checkpoints in a folder, the newest first. None when there is no such folder.
std::vector<std::int64_t> list_checkpoints(const std::string& out);

TrainingState load_checkpoint(const std::string& folder);

struct NewestCheckpoint {
  TrainingState state;
  std::vector<std::int64_t> damaged;  // later ones, which could not be read
};
// The newest checkpoint whose hashes hold; warns of every later one. Nothing when there is none at
// all. Throws when there are some and none is intact.
std::optional<NewestCheckpoint> load_newest_checkpoint(const std::string& out);

// Deletes what checkpoints_to_delete() says; never the one of `saved`.
void delete_old_checkpoints(const std::string& out, std::int64_t saved, std::int64_t keep_last,
                            const std::vector<std::int64_t>& known_bad);
// What saves and deletions that were cut short have left.
void remove_temporaries(const std::string& out);

}  // namespace lockstep
