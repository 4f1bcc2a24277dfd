#include "lockstep/base/cuda/runtime.h"
#include "lockstep/model/cuda/kernels.h"
#include "lockstep/model/cuda/pack.cuh"

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

// 16 bytes from memory to shared memory, without registers in between.
__device__ void copy_ahead(uint4* shared, const uint4* from) {
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// What a thread keeps of its row between passes over it: in shared memory where rows fit, so that
// they are read from memory once; each thread sees only its own packs.
template <bool kKept>
struct RowCopy {
  uint4* shared;
  const uint4* row;

  __device__ void fetch(unsigned packs) {
    if constexpr (kKept) {
      for (unsigned i = threadIdx.x; i < packs; i += kThreads) {
        copy_ahead(shared + i, row + i);
      }
      wait_for_copies();
    }
  }
  __device__ uint4 operator[](unsigned i) const { return kKept ? shared[i] : row[i]; }
};

// A block takes a row. Lanes of a warp all see every warp's value, kWarps being below 32: the sum
// over lanes then counts each 32 / kWarps times, a power of two, which is exact to undo.
template <typename T, bool kKept>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_kernel(unsigned vocab, std::size_t stride, T* __restrict__ logits,
                         const std::int32_t* __restrict__ targets, bool gradient,
                         float* __restrict__ losses, std::uint8_t* __restrict__ correct) {
  constexpr int kWide = kPack<T>;
  constexpr float kLog2e = 1.4426950408889634F;
  extern __shared__ uint4 kept[];
  __shared__ float shared[kWarps];
  T* row = logits + blockIdx.x * stride;
  const std::int32_t target = targets[blockIdx.x];
  const unsigned packs = (vocab + kWide - 1) / kWide;  // the last may reach beyond vocab
  if (target < 0) {
    if (threadIdx.x == 0) {
      losses[blockIdx.x] = 0.0F;
      correct[blockIdx.x] = 0;
    }
    if (!gradient) return;
    for (unsigned i = threadIdx.x; i < packs; i += kThreads) {
      reinterpret_cast<uint4*>(row)[i] = uint4{0, 0, 0, 0};
    }
    return;
  }
  const float chosen = to_float(row[target]);
  RowCopy<kKept> copy{kept, reinterpret_cast<const uint4*>(row)};
  copy.fetch(packs);

  float highest = -INFINITY;
  for (unsigned i = threadIdx.x; i < packs; i += kThreads) {
    float values[kWide];
    unpack(copy[i], values);
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      if (i * kWide + j < vocab) highest = fmaxf(highest, values[j]);
    }
  }
  highest = block_reduce(highest, shared, [](float value) { return warp_max(value); });
  const float offset = -highest * kLog2e;
  float total = 0;  // of exp(value - highest)
  for (unsigned i = threadIdx.x; i < packs; i += kThreads) {
    float values[kWide];
    unpack(copy[i], values);
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      if (i * kWide + j < vocab) total += exp2f(fmaf(values[j], kLog2e, offset));
    }
  }
  total = block_reduce(total, shared, [](float value) { return warp_sum(value); }) *
          (static_cast<float>(kWarps) / 32.0F);
  if (threadIdx.x == 0) {
    losses[blockIdx.x] = logf(total) + highest - chosen;
    correct[blockIdx.x] = chosen == highest ? 1 : 0;
  }
  if (!gradient) return;

  const float log_total = offset - log2f(total);
  for (unsigned i = threadIdx.x; i < packs; i += kThreads) {
    float values[kWide];
    unpack(copy[i], values);
#pragma unroll
    for (int j = 0; j < kWide; ++j) values[j] = exp2f(fmaf(values[j], kLog2e, log_total));
    const unsigned within = static_cast<unsigned>(target) - i * kWide;
#pragma unroll
    for (unsigned j = 0; j < kWide; ++j) {
      if (j == within) values[j] -= 1.0F;
    }
    store(row + std::size_t{i} * kWide, values);
  }
}

constexpr unsigned kSumThreads = 1024;

__global__ void __launch_bounds__(kSumThreads)
    sum_losses_kernel(std::size_t tokens, const float* __restrict__ losses,
                      const std::uint8_t* __restrict__ correct,
                      const std::int32_t* __restrict__ targets, LossTotal* __restrict__ total) {
  __shared__ double sums[kSumThreads];
  __shared__ std::int64_t counts[kSumThreads];
  __shared__ std::int64_t hits[kSumThreads];
  double sum = 0;
  std::int64_t count = 0;
  std::int64_t hit = 0;
  for (std::size_t i = threadIdx.x; i < tokens; i += kSumThreads) {
    sum += losses[i];
    count += targets[i] >= 0 ? 1 : 0;
    hit += correct[i];
  }
  sums[threadIdx.x] = sum;
  counts[threadIdx.x] = count;
  hits[threadIdx.x] = hit;
  for (unsigned half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      sums[threadIdx.x] += sums[threadIdx.x + half];
      counts[threadIdx.x] += counts[threadIdx.x + half];
      hits[threadIdx.x] += hits[threadIdx.x + half];
    }
  }
  if (threadIdx.x == 0) *total = {sums[0], counts[0], hits[0]};
}

__device__ std::uint64_t now() {
  std::uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

__global__ void stamp_time_kernel(std::uint64_t* time) { *time = now(); }

__global__ void close_lane_kernel(const LossTotal* total, LaneRecord* record,
                                  std::uint32_t* bad_losses) {
  record->total = *total;
  record->backward_done = now();
  if (!isfinite(total->loss)) ++*bad_losses;
}

}  // namespace

template <typename T>
void cross_entropy(std::size_t rows, std::size_t vocab, std::size_t stride, T* logits,
                   const std::int32_t* targets, bool gradient, float* losses,
                   std::uint8_t* correct, cudaStream_t stream) {
  constexpr std::size_t kMostShared = 220 << 10;
  const std::size_t bytes = (vocab * sizeof(T) + 15) / 16 * 16;
  const bool kept = bytes <= kMostShared;
  const auto kernel = kept ? cross_entropy_kernel<T, true> : cross_entropy_kernel<T, false>;
  const auto shared = static_cast<unsigned>(kept ? bytes : 0);
  allow_shared(reinterpret_cast<const void*>(kernel), shared);
  kernel<<<static_cast<unsigned>(rows), kThreads, shared, stream>>>(
      static_cast<unsigned>(vocab), stride, logits, targets, gradient, losses, correct);
  check_launch("cross_entropy");
}

void sum_losses(std::size_t tokens, const float* losses, const std::uint8_t* correct,
                const std::int32_t* targets, LossTotal* total, cudaStream_t stream) {
  sum_losses_kernel<<<1, kSumThreads, 0, stream>>>(tokens, losses, correct, targets, total);
  check_launch("sum_losses");
}

void stamp_time(std::uint64_t* time, cudaStream_t stream) {
  stamp_time_kernel<<<1, 1, 0, stream>>>(time);
  check_launch("stamp_time");
}

void close_lane(const LossTotal* total, LaneRecord* record, std::uint32_t* bad_losses,
                cudaStream_t stream) {
  close_lane_kernel<<<1, 1, 0, stream>>>(total, record, bad_losses);
  check_launch("close_lane");
}

template void cross_entropy(std::size_t, std::size_t, std::size_t, float*, const std::int32_t*,
                            bool, float*, std::uint8_t*, cudaStream_t);
template void cross_entropy(std::size_t, std::size_t, std::size_t, __nv_bfloat16*,
                            const std::int32_t*, bool, float*, std::uint8_t*, cudaStream_t);

}  // namespace lockstep::cuda
