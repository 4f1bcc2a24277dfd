#pragma once

#include "cli/train_options.h"

namespace lockstep::cli {

// Computes the lane that options.replay names once more and tells what is not finite in it. Returns
// 3 if something is, 0 if nothing is.
int replay_lane(const TrainOptions& options);

}  // namespace lockstep::cli
