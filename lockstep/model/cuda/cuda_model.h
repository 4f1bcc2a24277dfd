#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/model/cuda/cuda_hash.h"
#include "lockstep/model/cuda/cuda_kernels.h"
#include "lockstep/base/cuda_memory.h"
#include "lockstep/model/cuda/cuda_passes.h"
#include "lockstep/model/cuda/cuda_staging.h"
#include "lockstep/model/gpu_model.h"

namespace lockstep {

// What a lane's graph is captured for.
struct CudaLaneShape {
  std::uint32_t slot;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> merges;
  auto operator<=>(const CudaLaneShape&) const = default;
};

struct CudaCapturedLane {
  int runs = 0;
  CudaGraph graph;
};

// GpuModel on CUDA: the state here, lanes in cuda_lanes.cc.
class CudaModel final : public GpuModel {
 public:
  explicit CudaModel(const GpuModelOptions& options);

  const ParameterLayout& layout() const override { return layout_; }

  void set_parameters(std::span<const float> values) override;
  void get_parameters(std::span<float> values, Range range) const override;
  void set_moments(std::span<const float> first, std::span<const float> second) override;
  void get_moments(std::span<float> first, std::span<float> second) const override;
  void get_slot(std::uint32_t slot, std::span<float> values) const override;

  LossSum loss(const Batch& batch) override;
  GpuLaneResult gradient(const Batch& batch, std::uint32_t slot, std::span<const SlotMerge> merges,
                         std::span<const std::uint32_t> staged, const RangeReady& ready) override;
  void skip(std::uint32_t slot, std::span<const SlotMerge> merges,
            std::span<const std::uint32_t> staged, const RangeReady& ready) override;

  void stage(std::uint32_t slot, std::span<float> host) override { staging_.attach(slot, host); }
  void upload(std::uint32_t slot, Range range) override {
    staging_.upload(slot, range, stream_.get());
  }

  void block_squares(Range range, std::span<double> sums) override;
  void update(float factor, double learning_rate, std::int64_t step) override;
  std::vector<Blake3Hash> tensor_hashes() const override;
  std::size_t bytes() const override { return bytes_; }

 private:
  // A range of the gradient that is told at once, and when its work on the device is done.
  struct Bucket {
    Range range;
    CudaEvent computed, copied;
  };

  CudaParameters parameters() const { return {parameters_.data(), rounded_.data()}; }
  CudaBatch batch_memory() const {
    return {tokens_.data(), targets_.data(), token_begin_.data(), token_places_.data()};
  }
  std::vector<float*> slot_pointers() const;
  void cut_buckets();
  void send(const Batch& batch);
  void send_token_index();
  void enqueue_lane(const CudaLaneShape& shape, bool capturing);
  void run_lane(const CudaLaneShape& shape);
  void merge(const CudaLaneShape& shape, Range range);
  void record(const CudaEvent& event, bool capturing);
  void deliver(std::span<const std::uint32_t> staged, const RangeReady& ready);
  LossSum receive_loss();
  void wait() const;
  void copy(void* to, const void* from, std::size_t bytes) const;

  const ParameterLayout layout_;
  const GpuModelOptions options_;
  CudaStream stream_;
  DeviceArray<float> parameters_, first_, second_;
  DeviceArray<__nv_bfloat16> rounded_;
  std::vector<DeviceArray<float>> slots_;
  std::unique_ptr<CudaPasses> passes_;
  CudaStaging staging_;
  DeviceArray<cuda::Piece> pieces_;
  DeviceArray<double> squares_;
  DeviceArray<std::int32_t> tokens_, targets_;
  DeviceArray<std::uint32_t> token_begin_, token_places_;
  PinnedArray<std::int32_t> host_tokens_, host_targets_;
  PinnedArray<std::uint32_t> host_begin_, host_places_;
  PinnedArray<cuda::LossTotal> host_total_;
  PinnedArray<double> host_squares_;
  std::vector<Bucket> buckets_;
  CudaEvent begun_, forward_done_, backward_done_;
  std::map<CudaLaneShape, CudaCapturedLane> lanes_;
  mutable CudaHasher hasher_;
  std::size_t bytes_ = 0;
};

}  // namespace lockstep
