#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/blake3.h"
#include "lockstep/model/adamw.h"
#include "lockstep/model/transformer.h"

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
};

struct GpuLaneResult {
  LossSum sum;
  double forward_seconds = 0;  // on the GPU
  double backward_seconds = 0;
};

// Parameters, moments and the gradients of lanes on a GPU, and all arithmetic on them. A gradient
// is computed into a slot, a buffer of the size of the model. Bits depend on the operands and the
// kind of GPU. Batches have the context of the options and at most its rows. One thread at a time.
class GpuModel {
 public:
  virtual ~GpuModel() = default;

  virtual const ParameterLayout& layout() const = 0;

  // Whole flat buffers; moments are those of the shard.
  virtual void set_parameters(std::span<const float> values) = 0;
  virtual void get_parameters(std::span<float> values, Range range) const = 0;
  virtual void set_moments(std::span<const float> first, std::span<const float> second) = 0;
  virtual void get_moments(std::span<float> first, std::span<float> second) const = 0;
  virtual void get_slot(std::uint32_t slot, std::span<float> values) const = 0;

  virtual LossSum loss(const Batch& batch) = 0;
  // The gradient of the sum of token losses into `slot`, then the merges. Slots that are staged are
  // copied to the memory that stage() named for them. `ready` is told of ranges that are final
  // there and in the merges, in ascending order.
  virtual GpuLaneResult gradient(const Batch& batch, std::uint32_t slot,
                                 std::span<const SlotMerge> merges,
                                 std::span<const std::uint32_t> staged,
                                 const RangeReady& ready) = 0;
  // The same for a gradient of zeros.
  virtual void skip(std::uint32_t slot, std::span<const SlotMerge> merges,
                    std::span<const std::uint32_t> staged, const RangeReady& ready) = 0;

  // Memory of the host for a slot; page-locked here where the system allows it. It outlives this.
  virtual void stage(std::uint32_t slot, std::span<float> host) = 0;
  // Brings a range of a staged slot back to the GPU.
  virtual void upload(std::uint32_t slot, Range range) = 0;

  // Of slot 0: as norm.h has them, but in an order of the GPU's own.
  virtual void block_squares(Range range, std::span<double> sums) = 0;
  // AdamW on the shard, with slot 0 times `factor`.
  virtual void update(float factor, double learning_rate, std::int64_t step) = 0;

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
