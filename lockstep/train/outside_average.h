#pragma once

#include <optional>
#include <span>

#include "lockstep/base/range.h"
#include "lockstep/model/batch.h"

namespace lockstep {

// Workers that are no ranks of the trainer's communicator, and with whose gradients the trainer's
// own is averaged in every step. They are trusted to make the same steps with the same options;
// nothing is compared. Used by the trainer's thread.
class OutsideAverage {
 public:
  virtual ~OutsideAverage() = default;

  // Before a step: the samples [begin, end) of its global batch that this worker computes, none
  // perhaps. Nothing: the others have ended the job.
  virtual std::optional<Range> next_share() = 0;
  // `mean` is the gradient of this worker's mean loss per token, in the order of the layout, and
  // finite; `own` are the sums that it comes from. Replaces `mean` by the average over all workers.
  // Nothing: the others have ended the job, and the step is not made.
  struct Averaged {
    std::optional<double> loss;  // over all workers, where they tell it
  };
  virtual std::optional<Averaged> average(std::span<float> mean, const LossSum& own) = 0;
};

}  // namespace lockstep
