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
#include "lockstep/model/adamw.h"
#include "lockstep/model/transformer.h"
#include "lockstep/model/update.h"

namespace lockstep {

struct SlotMerge {
  std::uint32_t into = 0;  // slots: into = into + from
  std::uint32_t from = 0;
  bool operator==(const SlotMerge&) const = default;
};

struct GpuModelOptions {
  ModelConfig model;
  Precision precision = Precision::kBf16;
  AdamWOptions adamw;
  int rows = 1;
  int context = 1;
  std::uint32_t slots = 1;
  Range shard;             // whose moments are held
  bool recompute = false;  // of activations, which spares memory
  int device = 0;          // counted round the GPUs that there are
  // The longest wait for the GPU, and what is called meanwhile, every millisecond or so: it throws
  // to give up.
  std::chrono::nanoseconds patience = std::chrono::minutes(10);
  std::function<void()> while_waiting = {};
};

struct GpuLaneResult {
  LossSum sum;
  double forward_seconds = 0;  // on the GPU
  double backward_seconds = 0;
};

// Where the sums of a step go once its last lane is merged: one of the two functions.
struct GpuDelivery {
  std::vector<std::uint32_t> slots;
  // Slots are copied to the memory that stage() named for them, range by range; told when a range
  // is there, in ascending order.
  RangeReady copied;
  // To enqueue what makes elements of slot 0 the sum over all workers; all slots are given.
  std::function<void(std::span<float* const> slots, Range range, DeviceStream stream)> reduce;
};

// Parameters, moments and the gradients of lanes on a GPU, and all arithmetic on them. A gradient
// is computed into a slot, a buffer of the size of the model. Bits depend on the operands and the
// kind of GPU. Batches have the context of the options and at most its rows. One thread at a time.
//
// A step is enqueued and waited for once: gradient() or skip() for every lane, update(), then
// finish_lanes() and finish_update(). A wait that ends by its deadline leaves the GPU's memory to
// the end of the process: nobody can say who still writes to it.
class GpuModel {
 public:
  virtual ~GpuModel() = default;

  virtual const ParameterLayout& layout() const = 0;

  // Whole flat buffers; moments are those of the shard.
  virtual void set_parameters(std::span<const float> values) = 0;
  virtual void get_parameters(std::span<float> values) const = 0;
  virtual void set_moments(std::span<const float> first, std::span<const float> second) = 0;
  virtual void get_moments(std::span<float> first, std::span<float> second) const = 0;
  virtual void get_slot(std::uint32_t slot, std::span<float> values) const = 0;
  // `exchange` enqueues what fills in the parameters outside of the shard.
  virtual void exchange_parameters(
      const std::function<void(float* parameters, DeviceStream stream)>& exchange) = 0;

  virtual LossSum loss(const Batch& batch) = 0;
  // Enqueues the gradient of the sum of token losses into `slot`, then the merges. With a delivery
  // that copies, returns when everything is copied; otherwise at once.
  virtual void gradient(const Batch& batch, std::uint32_t slot, std::span<const SlotMerge> merges,
                        const GpuDelivery* delivery = nullptr) = 0;
  // The same for a gradient of zeros.
  virtual void skip(std::uint32_t slot, std::span<const SlotMerge> merges,
                    const GpuDelivery* delivery = nullptr) = 0;
  // Waits; the lanes that were enqueued since it was called last, in that order.
  virtual std::vector<GpuLaneResult> finish_lanes() = 0;

  // Memory of the host for a slot; page-locked here where the system allows it. It outlives this.
  virtual void stage(std::uint32_t slot, std::span<float> host) = 0;
  // The same for what set_parameters() and get_parameters() are often given.
  virtual void page_lock(std::span<float> host) = 0;
  // Enqueues that a range of a staged slot is brought back to the GPU, while others may still be
  // computed there. What is called next, but other uploads, comes after it.
  virtual void upload(std::uint32_t slot, Range range) = 0;

  // Of slot 0: as norm.h has them, but in an order of the GPU's own. Waits.
  virtual void block_squares(Range range, std::span<double> sums) = 0;
  // Enqueues the update of the shard with slot 0, whose norm is taken first unless it is given. The
  // losses that it looks at are those of lanes that finish_lanes() has not told of.
  virtual void update(const UpdateRequest& request) = 0;
  // Waits.
  virtual UpdateResult finish_update() = 0;

  // Of every tensor's parameters, in the order of layout().tensors().
  virtual std::vector<Blake3Hash> tensor_hashes() const = 0;
  virtual std::size_t bytes() const = 0;  // taken on the GPU
};

// Why there is no GPU to compute on, in a few words; nothing when there is one.
std::optional<std::string> gpu_refusal();

// Of the first GPU; models on GPUs of one name have the same bits.
std::string gpu_name();

// Throws Error{kInvalidArgument} for a model that the kernels do not fit, Error{kIo} when memory is
// short or there is no GPU.
std::unique_ptr<GpuModel> make_gpu_model(const GpuModelOptions& options);

// GFLOP/s of a product of three sizes 8192 on random operands, the best of several.
double gpu_matmul_gflops(Precision precision);

}  // namespace lockstep
