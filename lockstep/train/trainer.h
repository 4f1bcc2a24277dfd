#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/base/float_buffer.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/data/lanes.h"
#include "lockstep/data/samples.h"
#include "lockstep/model/adamw.h"
#include "lockstep/model/schedule.h"
#include "lockstep/model/transformer.h"
#include "lockstep/train/reducer.h"

namespace lockstep {

struct TrainerOptions {
  ModelConfig model;
  Precision precision = Precision::kF32;
  std::uint64_t global_batch = 8;
  std::uint64_t micro_batch = 8;
  AdamWOptions adamw;
  Schedule schedule;  // its steps are those of the run
  double clip = 1.0;  // 0: none
  std::uint64_t seed = 0;
  std::int64_t eval_every = 0;  // 0: only after the last step
  std::uint64_t eval_samples = 64;
};

// What happened in one step. Losses are means per token, in nats.
struct StepReport {
  std::int64_t step = 0;  // from 1: the steps that are done
  double epoch = 0;       // passes over the data that are done
  double loss = 0;
  double gradient_norm = 0;  // of the mean gradient, before clipping
  double learning_rate = 0;
  std::int64_t tokens = 0;
  std::optional<double> validation_loss;
  double seconds = 0;  // of the step, without validation
};

// The step loop of one worker: every lane's gradient, their sum, clipping, AdamW. The bits of the
// parameters depend on the options, the data and the kind of processor, not on the threads.
class Trainer {
 public:
  // Fresh parameters from the seed. Throws Error{kInvalidArgument} for options that cannot be.
  Trainer(const TrainerOptions& options, Samples training, Samples validation, ThreadPool& pool);

  const ParameterLayout& layout() const { return transformer_.layout(); }
  std::span<float> parameters() { return parameters_.span(); }
  std::int64_t steps_done() const { return step_; }
  const LanePlan& lanes() const { return lanes_; }
  // Bytes that are held for parameters, moments and sums of gradients.
  std::size_t state_bytes() const;

  AdamW& optimizer() { return adamw_; }
  // Goes on after `steps` steps; parameters and moments are the caller's to set.
  void resume_after(std::int64_t steps) { step_ = steps; }

  // One step. When a gradient is not finite, throws Error{kNonFinite} that names the lane, its
  // samples, the tensor and the element; the parameters are as they were before the step.
  StepReport step();

  // Mean loss over some of the validation samples, the same ones every time; nothing without any.
  std::optional<double> evaluate();

  // Steps until the schedule's end, or until `stop` is positive, which is looked at after every
  // step. `report` is called after each.
  void run(const std::atomic<int>& stop, const std::function<void(const StepReport&)>& report);

 private:
  Batch lane_batch(std::uint32_t lane);
  [[noreturn]] void halt(const ReducedStep& reduced);

  const TrainerOptions options_;
  const Samples training_;
  const Samples validation_;
  ThreadPool& pool_;
  const LanePlan lanes_;
  Transformer transformer_;
  FloatBuffer parameters_;
  AdamW adamw_;
  GradientReducer reducer_;
  std::vector<double> block_sums_;
  std::int64_t step_ = 0;

  // The lane under way.
  std::vector<std::uint64_t> sample_ids_;
  std::vector<std::int32_t> tokens_;
  std::vector<std::int32_t> targets_;
};

}  // namespace lockstep
