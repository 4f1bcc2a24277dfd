#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "lockstep/base/hash/blake3.h"

namespace lockstep {

enum class CheckpointPhase {
  kTraining,       // no checkpoint under way
  kSaveRequested,  // the step is agreed on; workers tell that their weights are there
  kWeightsSynced,  // all of them did
  kWriting,        // rank 0 writes, everybody trains
  kComplete,       // it is on disk
};

std::string_view to_string(CheckpointPhase phase);

// The phases of a checkpoint, the same on every worker. Pure; a call out of its phase is false or
// does nothing.
class CheckpointPhases {
 public:
  explicit CheckpointPhases(std::uint32_t world_size) : ready_(world_size, false) {}

  CheckpointPhase phase() const { return phase_; }
  // Of the last request that was accepted.
  std::int64_t checkpoint_step() const { return step_; }

  // False while an earlier checkpoint is under way: this one is skipped.
  [[nodiscard]] bool request_save(std::int64_t step);
  // An acknowledgement counts once per rank and only for the step that was requested. True with the
  // last one, and then no more.
  bool worker_ready(std::uint32_t rank, std::int64_t step);
  bool start_writing();
  bool complete();
  // Also gives up a save that did not succeed, in whatever phase.
  void resume_training();

 private:
  CheckpointPhase phase_ = CheckpointPhase::kTraining;
  std::int64_t step_ = 0;
  std::uint32_t missing_ = 0;
  std::vector<bool> ready_;
};

// Whether all workers have the same weights.
bool verify_weight_consistency(const Blake3Hash& own, const std::vector<Blake3Hash>& all);

}  // namespace lockstep
