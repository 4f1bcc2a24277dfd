#include "lockstep/model/cuda/cuda_kernels.h"
#include "lockstep/model/cuda/cuda_launch.h"
#include "lockstep/model/cuda/cuda_pack.cuh"

namespace lockstep::cuda {
namespace {

constexpr unsigned kThreads = 512;
constexpr unsigned kWarps = kThreads / 32;

template <typename Reduce>
__device__ float block_reduce(float value, float* shared, Reduce reduce) {
  value = reduce(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = reduce(shared[threadIdx.x % kWarps]);
  __syncthreads();
  return value;
}

// A block takes a row. Lanes of a warp all see every warp's value, kWarps being below 32: the sum
// over lanes then counts each 32 / kWarps times, a power of two, which is exact to undo.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_kernel(unsigned vocab, std::size_t stride, T* __restrict__ logits,
                         const std::int32_t* __restrict__ targets, bool gradient,
                         float* __restrict__ losses) {
  constexpr int kWide = kPack<T>;
  constexpr float kLog2e = 1.4426950408889634F;
  __shared__ float shared[kWarps];
  T* row = logits + blockIdx.x * stride;
  const std::int32_t target = targets[blockIdx.x];
  const unsigned packs = (vocab + kWide - 1) / kWide;  // the last may reach beyond vocab
  if (target < 0) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0.0F;
    if (!gradient) return;
    for (unsigned i = threadIdx.x; i < packs; i += kThreads) {
      reinterpret_cast<uint4*>(row)[i] = uint4{0, 0, 0, 0};
    }
    return;
  }
  const float chosen = to_float(row[target]);

  float highest = -INFINITY;
  float total = 0;  // of exp(value - highest)
  for (unsigned i = threadIdx.x; i < packs; i += kThreads) {
    float values[kWide];
    load(row + std::size_t{i} * kWide, values);
    float most = highest;
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      if (i * kWide + j < vocab) most = fmaxf(most, values[j]);
    }
    total *= exp2f((highest - most) * kLog2e);
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      if (i * kWide + j < vocab) total += exp2f((values[j] - most) * kLog2e);
    }
    highest = most;
  }
  const float most = block_reduce(highest, shared, [](float value) { return warp_max(value); });
  if (highest > -INFINITY) total *= exp2f((highest - most) * kLog2e);
  total = block_reduce(total, shared, [](float value) { return warp_sum(value); }) *
          (static_cast<float>(kWarps) / 32.0F);
  if (threadIdx.x == 0) losses[blockIdx.x] = logf(total) + most - chosen;
  if (!gradient) return;

  const float inverse = 1.0F / total;
  for (unsigned i = threadIdx.x; i < packs; i += kThreads) {
    float values[kWide];
    load(row + std::size_t{i} * kWide, values);
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      const unsigned column = i * kWide + j;
      values[j] = exp2f((values[j] - most) * kLog2e) * inverse;
      if (column == static_cast<unsigned>(target)) values[j] -= 1.0F;
      if (column >= vocab) values[j] = 0.0F;
    }
    store(row + std::size_t{i} * kWide, values);
  }
}

constexpr unsigned kSumThreads = 1024;

__global__ void __launch_bounds__(kSumThreads)
    sum_losses_kernel(std::size_t tokens, const float* __restrict__ losses,
                      const std::int32_t* __restrict__ targets, LossTotal* __restrict__ total) {
  __shared__ double sums[kSumThreads];
  __shared__ std::int64_t counts[kSumThreads];
  double sum = 0;
  std::int64_t count = 0;
  for (std::size_t i = threadIdx.x; i < tokens; i += kSumThreads) {
    sum += losses[i];
    count += targets[i] >= 0 ? 1 : 0;
  }
  sums[threadIdx.x] = sum;
  counts[threadIdx.x] = count;
  for (unsigned half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      sums[threadIdx.x] += sums[threadIdx.x + half];
      counts[threadIdx.x] += counts[threadIdx.x + half];
    }
  }
  if (threadIdx.x == 0) *total = {sums[0], counts[0]};
}

}  // namespace

template <typename T>
void cross_entropy(std::size_t rows, std::size_t vocab, std::size_t stride, T* logits,
                   const std::int32_t* targets, bool gradient, float* losses, cudaStream_t stream) {
  cross_entropy_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
      static_cast<unsigned>(vocab), stride, logits, targets, gradient, losses);
  check_launch("cross_entropy");
}

void sum_losses(std::size_t tokens, const float* losses, const std::int32_t* targets,
                LossTotal* total, cudaStream_t stream) {
  sum_losses_kernel<<<1, kSumThreads, 0, stream>>>(tokens, losses, targets, total);
  check_launch("sum_losses");
}

template void cross_entropy(std::size_t, std::size_t, std::size_t, float*, const std::int32_t*,
                            bool, float*, cudaStream_t);
template void cross_entropy(std::size_t, std::size_t, std::size_t, __nv_bfloat16*,
                            const std::int32_t*, bool, float*, cudaStream_t);

}  // namespace lockstep::cuda
