#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lockstep/base/cuda/runtime.h"
#include "lockstep/model/cuda/hash.h"
#include "lockstep/model/cuda/kernels.h"
#include "lockstep/model/cuda/passes.h"
#include "lockstep/model/cuda/staging.h"
#include "lockstep/model/gpu_model.h"

namespace lockstep {

// Work that is enqueued call by call the first times, so that libraries load what they need, and
// then captured as a graph.
class CudaCaptured {
 public:
  // `enqueue(capturing)` must enqueue the same work every time.
  void run(cudaStream_t stream, const std::function<void(bool capturing)>& enqueue);

 private:
  int runs_ = 0;
  CudaGraph graph_;
};

// What a lane's graph is captured for.
struct CudaLaneShape {
  std::uint32_t accumulator;
  std::vector<AccumulatorMerge> merges;
  auto operator<=>(const CudaLaneShape&) const = default;
};

// What the host gives for a lane and gets back. It may be touched again once the lane is done.
struct CudaLaneMemory {
  CudaLaneMemory(std::size_t tokens, std::size_t vocab);

  PinnedArray<std::int32_t> tokens, targets;
  PinnedArray<std::uint32_t> token_begin, token_places;
  PinnedArray<cuda::LaneRecord> record;
};

// GpuModel on CUDA.
class CudaModel final : public GpuModel {
 public:
  explicit CudaModel(const GpuModelOptions& options);
  // Waits for what is under way, but not for long: the GPU is given up then.
  ~CudaModel() override;
  CudaModel(const CudaModel&) = delete;
  CudaModel& operator=(const CudaModel&) = delete;

  const ParameterLayout& layout() const override { return layout_; }

  void set_patience(std::chrono::nanoseconds patience) override { patience_ = patience; }
  void resize(std::uint32_t accumulators, Range shard) override;

  void set_parameters(std::span<const float> values) override;
  void get_parameters(std::span<float> values) const override;
  void set_moments(std::span<const float> first, std::span<const float> second) override;
  void get_moments(std::span<float> first, std::span<float> second) const override;
  void get_accumulator(std::uint32_t accumulator, std::span<float> values) const override;
  void complete_parameters(
      const std::function<void(float* parameters, DeviceStream stream)>& enqueue) override;

  LossSum loss(const Batch& batch) override;
  void logits(std::span<const std::int32_t> tokens, std::span<float> out) override;
  void gradient(const Batch& batch, std::uint32_t accumulator,
                std::span<const AccumulatorMerge> merges, const GpuDelivery* delivery) override;
  void skip(std::uint32_t accumulator, std::span<const AccumulatorMerge> merges,
            const GpuDelivery* delivery) override;
  std::vector<LaneResult> finish_lanes() override;

  void stage(std::uint32_t accumulator, std::span<float> host) override {
    staging_.attach(accumulator, host);
  }
  void unstage() override;
  void page_lock(std::span<float> host) override { staging_.lock(host); }
  void upload(std::uint32_t accumulator, Range range) override {
    staging_.upload(accumulator, range);
  }

  void block_squares(Range range, std::span<double> sums) override;
  void update(const UpdateRequest& request) override;
  UpdateResult finish_update() override;
  std::vector<Blake3Hash> tensor_hashes() const override;
  std::size_t bytes() const override;

 private:
  // A range of the gradient that is told at once, and when its work on the device is done.
  struct Bucket {
    Range range;
    CudaEvent computed, delivered;
  };

  CudaParameters parameters() const { return {parameters_.data(), rounded_.data()}; }
  CudaBatch batch_memory() const {
    return {tokens_.data(), targets_.data(), token_begin_.data(), token_places_.data()};
  }
  void take_accumulators(std::uint32_t count);
  void take_moments(Range shard);
  void cut_buckets();
  CudaLaneMemory& next_lane();
  void send(const Batch& batch, CudaLaneMemory& lane);
  void send_token_index(CudaLaneMemory& lane);
  void enqueue_lane(const CudaLaneShape& shape, bool capturing);
  void merge(const CudaLaneShape& shape, Range range);
  void deliver(const GpuDelivery& delivery);
  void enqueue_update(bool norm_given);
  void round_parameters();
  void clear_bad_losses() const;
  // A step may have any number of lanes.
  CudaPatience patience() const {
    const auto lanes = static_cast<std::int64_t>(std::max<std::size_t>(1, lanes_enqueued_));
    return {patience_ * lanes, options_.while_waiting};
  }
  void wait(const char* operation) const;
  // For all streams.
  void wait_for_all(const char* operation, const CudaPatience& patience) const;
  // Bytes between host and device, when everything before is done.
  void copy(void* to, const void* from, std::size_t bytes) const;
  // The same without waiting: the host's memory is page-locked.
  void enqueue_copy(void* to, const void* from, std::size_t bytes) const;

  const ParameterLayout layout_;
  const GpuModelOptions options_;
  std::chrono::nanoseconds patience_ = std::chrono::minutes(10);
  CudaStream stream_;
  Range shard_;
  DeviceArray<float> parameters_, first_, second_;
  DeviceArray<__nv_bfloat16> rounded_;
  std::vector<DeviceArray<float>> accumulators_;
  std::unique_ptr<CudaPasses> passes_;
  mutable CudaStaging staging_;
  DeviceArray<cuda::Piece> pieces_;
  DeviceArray<double> squares_, tree_scratch_;
  DeviceArray<cuda::LaneRecord> record_;
  DeviceArray<std::uint32_t> bad_losses_;
  DeviceArray<cuda::UpdateState> update_;
  DeviceArray<std::int32_t> tokens_, targets_;
  DeviceArray<std::uint32_t> token_begin_, token_places_;
  PinnedArray<double> host_squares_;
  PinnedArray<cuda::UpdateState> host_update_;
  std::deque<CudaLaneMemory> lane_memory_;
  std::size_t lanes_enqueued_ = 0;  // since finish_lanes()
  std::vector<Bucket> buckets_;
  CudaEvent done_;
  std::map<CudaLaneShape, CudaCaptured> lanes_;
  CudaCaptured update_with_norm_, update_of_norm_;
  mutable CudaHasher hasher_;
};

}  // namespace lockstep
