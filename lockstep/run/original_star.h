#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/model/layout.h"
#include "lockstep/server/settings.h"
#include "lockstep/server/worker_client.h"
#include "lockstep/train/outside_average.h"
#include "lockstep/train/trainer.h"

namespace lockstep {

// A worker of the original gradient protocol (docs/wire_protocol.md), whose gradients are those of
// a trainer. What travels is this worker's mean gradient, and what comes back the mean of all
// workers' means, whoever they are.
//
// In mode blocks: the blocks from last to first, each with its tensors in the order of Component,
// then lm_head, final norm and embedding. This worker computes the lanes that it would have as
// rank `worker_id` of `total_workers`. In mode vector: all tensors in the order of
// ParameterLayout::tensors(), with loss, correct and total in tokens; the coordinator deals out
// the samples of a step. Used by one thread.
class OriginalStar final : public OutsideAverage {
 public:
  // Joins the coordinator of worker.coordinator. Throws Error{kInvalidArgument} before that, if a
  // message would be longer than peers of that protocol take.
  OriginalStar(WorkerOptions worker, Mode mode, const TrainerOptions& how);

  int worker_id() const { return client_.worker_id(); }
  int total_workers() const { return client_.total_workers(); }
  const std::string& coordinator() const { return client_.coordinator(); }

  // In mode blocks the coordinator ends the job, if at all, instead of averaging the next block.
  std::optional<Range> next_share() override;
  std::optional<Averaged> average(std::span<float> mean, const LossSum& own) override;

 private:
  // False: the job has ended.
  bool average_blocks(std::span<float> mean);
  bool average_block(std::span<float> mean, int block);
  double average_vector(std::span<float> mean, const LossSum& own);
  // Between the flat gradient and what travels, which is these ranges one after the other.
  void gather(std::span<const float> flat, std::span<const Range> ranges);
  void scatter(std::span<const Range> ranges, std::span<float> flat) const;

  const ParameterLayout layout_;
  const Mode mode_;
  const std::uint64_t global_batch_;
  WorkerClient client_;
  Range share_;             // in mode blocks
  std::uint64_t step_ = 0;  // on the wire: of this job, from 0
  std::vector<float> message_;
};

}  // namespace lockstep
