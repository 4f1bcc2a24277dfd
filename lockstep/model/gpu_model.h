#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/cuda/device_stream.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/model/batch.h"
#include "lockstep/model/config.h"
#include "lockstep/model/layout.h"
#include "lockstep/model/update.h"

namespace lockstep {

struct GpuModelOptions {
  ModelConfig model;
  Precision precision = Precision::kBf16;
  AdamWOptions adamw;
  int rows = 1;
  int context = 1;
  std::uint32_t accumulators = 1;
  Range shard;             // the elements whose moments are held
  bool recompute = false;  // compute activations again in the backward pass, which saves memory
  // Our own attention in bf16, as on GPUs for which cuDNN has none that is deterministic. For
  // tests.
  bool plain_attention = false;
  int device = 0;  // modulo the number of GPUs
  // `while_waiting` is called about every millisecond during a wait; it throws to end the wait.
  std::function<void()> while_waiting = {};
};

// Where the sums of a step go when its last lane is merged. One of the two functions is set.
struct GpuDelivery {
  std::vector<std::uint32_t> accumulators;
  // The accumulators are copied, range by range, to the host memory that stage() named for them.
  // Called when a range has been copied, in ascending order.
  RangeReady copied;
  // Gets all accumulators and enqueues what turns a range of accumulator 0 into the sum over all
  // workers.
  std::function<void(std::span<float* const> accumulators, Range range, DeviceStream stream)>
      reduce;
};

// Parameters, moments and accumulators on a GPU, and all arithmetic on them. An accumulator is a
// buffer of the size of the model; gradients are computed into it. The bits of a result depend on
// the operands and the kind of GPU. Batches have the context of the options and at most its rows.
// One thread at a time.
//
// A step is enqueued and waited for once: gradient() or skip() for every lane, update(), then
// finish_lanes() and finish_update(). After a wait that timed out the GPU's memory is never freed:
// the GPU may still write to it.
class GpuModel {
 public:
  virtual ~GpuModel() = default;

  virtual const ParameterLayout& layout() const = 0;

  // The longest wait for the GPU, for each lane that is enqueued. Ten minutes unless it is set.
  virtual void set_patience(std::chrono::nanoseconds patience) = 0;
  // Other memory: so many accumulators, whose contents are lost unless the number stays, and
  // moments for `shard`, which are zeros unless the range stays. Waits. Throws Error{kDevice} when
  // the GPU has too little.
  virtual void resize(std::uint32_t accumulators, Range shard) = 0;

  // Whole flat buffers; moments are those of the shard.
  virtual void set_parameters(std::span<const float> values) = 0;
  virtual void get_parameters(std::span<float> values) const = 0;
  virtual void set_moments(std::span<const float> first, std::span<const float> second) = 0;
  virtual void get_moments(std::span<float> first, std::span<float> second) const = 0;
  virtual void get_accumulator(std::uint32_t accumulator, std::span<float> values) const = 0;
  // `enqueue` enqueues the transfer that fills in the parameters outside of the shard. Waits for
  // it.
  virtual void complete_parameters(
      const std::function<void(float* parameters, DeviceStream stream)>& enqueue) = 0;

  virtual LossSum loss(const Batch& batch) = 0;
  // The logits after the last of `tokens`, one sequence of at most the context: vocab floats.
  virtual void logits(std::span<const std::int32_t> tokens, std::span<float> out) = 0;
  // Enqueues the gradient of the sum of token losses into `accumulator`, then the merges. With a
  // delivery that copies, returns when everything is copied; otherwise at once.
  virtual void gradient(const Batch& batch, std::uint32_t accumulator,
                        std::span<const AccumulatorMerge> merges,
                        const GpuDelivery* delivery = nullptr) = 0;
  // The same for a gradient of zeros.
  virtual void skip(std::uint32_t accumulator, std::span<const AccumulatorMerge> merges,
                    const GpuDelivery* delivery = nullptr) = 0;
  // Waits for the lanes that were enqueued since the last call; their results in that order.
  virtual std::vector<LaneResult> finish_lanes() = 0;

  // Sets the host memory that an accumulator is copied to. It is page-locked where the system
  // allows, and must live until unstage() or the end of the model.
  virtual void stage(std::uint32_t accumulator, std::span<float> host) = 0;
  // Gives that memory up, of all accumulators: waits for the lanes and copies under way, whose
  // results are forgotten, whatever has become of them. What is uploaded is in its accumulator.
  virtual void unstage() = 0;
  // Page-locks memory that set_parameters() and get_parameters() are often given. It must outlive
  // the model.
  virtual void page_lock(std::span<float> host) = 0;
  // Enqueues the copy of a range from the staged host memory back to its accumulator, while other
  // ranges may still be computed. Every later call but upload() sees the copied values.
  virtual void upload(std::uint32_t accumulator, Range range) = 0;

  // The squares of the norm blocks of accumulator 0, as in update.h, but added in the GPU's own
  // order. Waits.
  virtual void block_squares(Range range, std::span<double> sums) = 0;
  // Enqueues the update of the shard with the gradient in accumulator 0. Its norm is computed first
  // unless the request has it. Nothing is changed when the loss of a lane since the last
  // finish_lanes() is not finite.
  virtual void update(const UpdateRequest& request) = 0;
  // Waits.
  virtual UpdateResult finish_update() = 0;

  // Of every tensor's parameters, in the order of layout().tensors().
  virtual std::vector<Blake3Hash> tensor_hashes() const = 0;
  virtual std::size_t bytes() const = 0;  // taken on the GPU
};

// Why no GPU can be used, in a few words; nothing when one can.
std::optional<std::string> gpu_refusal();

// How many GPUs this process sees; 0 where none can be used.
int gpu_count();

// The name of the first GPU. Models on GPUs of one name have the same bits.
std::string gpu_name();

// What the bits of a result depend on besides: empty where nothing is computed on a GPU.
struct GpuVersions {
  std::string name = {};  // gpu_name()
  std::string cuda = {};  // that the kernels were compiled with
  std::string cublas_lt = {};
  std::string cudnn = {};
  bool operator==(const GpuVersions&) const = default;
};
GpuVersions gpu_versions();

// Throws Error{kInvalidArgument} for a model that the kernels do not support, Error{kDevice} when
// there is no GPU or too little memory.
std::unique_ptr<GpuModel> make_gpu_model(const GpuModelOptions& options);

// The best rate, in GFLOP/s, of several products of random matrices of 8192 x 8192.
double gpu_matmul_gflops(Precision precision);

}  // namespace lockstep
