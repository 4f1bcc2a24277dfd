#include "lockstep/train/checkpoint/checkpoint_phases.h"

#include <algorithm>

namespace lockstep {

std::string_view to_string(CheckpointPhase phase) {
  switch (phase) {
    case CheckpointPhase::kTraining: return "training";
    case CheckpointPhase::kSaveRequested: return "save requested";
    case CheckpointPhase::kWeightsSynced: return "weights synced";
    case CheckpointPhase::kWriting: return "writing";
    case CheckpointPhase::kComplete: return "complete";
  }
  return "unknown";
}

bool CheckpointPhases::request_save(std::int64_t step) {
  if (phase_ != CheckpointPhase::kTraining) return false;
  phase_ = CheckpointPhase::kSaveRequested;
  step_ = step;
  ready_.assign(ready_.size(), false);
  missing_ = static_cast<std::uint32_t>(ready_.size());
  return true;
}

bool CheckpointPhases::worker_ready(std::uint32_t rank, std::int64_t step) {
  if (phase_ != CheckpointPhase::kSaveRequested || step != step_) return false;
  if (rank >= ready_.size() || ready_[rank]) return false;
  ready_[rank] = true;
  if (--missing_ > 0) return false;
  phase_ = CheckpointPhase::kWeightsSynced;
  return true;
}

bool CheckpointPhases::start_writing() {
  if (phase_ != CheckpointPhase::kWeightsSynced) return false;
  phase_ = CheckpointPhase::kWriting;
  return true;
}

bool CheckpointPhases::complete() {
  if (phase_ != CheckpointPhase::kWriting) return false;
  phase_ = CheckpointPhase::kComplete;
  return true;
}

void CheckpointPhases::resume_training() { phase_ = CheckpointPhase::kTraining; }

bool verify_weight_consistency(const Blake3Hash& own, const std::vector<Blake3Hash>& all) {
  return std::ranges::all_of(all, [&](const Blake3Hash& hash) { return hash == own; });
}

}  // namespace lockstep
