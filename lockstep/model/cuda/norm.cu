#include <algorithm>

#include "lockstep/base/cuda/runtime.h"
#include "lockstep/model/cuda/kernels.h"
#include "lockstep/model/cuda/pack.cuh"

namespace lockstep::cuda {
namespace {

constexpr int kWarps = 8;               // of a block; a warp takes a row
constexpr unsigned kBlocks = 264;       // of the backward pass: part of the order of its sums
constexpr std::size_t kMostPacks = 16;  // that a lane holds

template <typename T, int kPacks>
__global__ void __launch_bounds__(kWarps * 32)
    norm_forward_kernel(unsigned rows, unsigned packs, const T* __restrict__ x,
                        const float* __restrict__ weight, float eps, T* __restrict__ out,
                        float* __restrict__ rstd_out) {
  constexpr int kWide = kPack<T>;
  const unsigned lane = threadIdx.x % 32;
  const unsigned row = blockIdx.x * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const std::size_t at = std::size_t{row} * packs * kWide;
  float values[kPacks][kWide];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const unsigned place = lane + 32 * i;
    if (place >= packs) continue;
    load(x + at + place * kWide, values[i]);
#pragma unroll
    for (int j = 0; j < kWide; ++j) squares += values[i][j] * values[i][j];
  }
  const float mean = warp_sum(squares) / static_cast<float>(packs * kWide);
  const float rstd = 1.0F / sqrtf(mean + eps);
  if (lane == 0) rstd_out[row] = rstd;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const unsigned place = lane + 32 * i;
    if (place >= packs) continue;
    float scale[kWide];
    load_floats(weight + place * kWide, scale);
#pragma unroll
    for (int j = 0; j < kWide; ++j) values[i][j] *= rstd * scale[j];
    store(out + at + place * kWide, values[i]);
  }
}

// Every warp walks over rows with a fixed stride and keeps its share of dweight in registers; the
// warps of a block add theirs up in order.
template <typename T, int kPacks>
__global__ void __launch_bounds__(kWarps * 32)
    norm_backward_kernel(NormBackward<T> call, unsigned packs) {
  constexpr int kWide = kPack<T>;
  extern __shared__ float shared[];  // a row per warp
  const unsigned lane = threadIdx.x % 32;
  const unsigned warp = threadIdx.x / 32;
  const unsigned width = packs * kWide;
  float dweight[kPacks][kWide] = {};
  for (std::size_t row = blockIdx.x * kWarps + warp; row < call.rows; row += kBlocks * kWarps) {
    const std::size_t at = row * width;
    const float rstd = call.rstd[row];
    // All that is read from memory is asked for first.
    uint4 x[kPacks];
    uint4 dout[kPacks];
    uint4 before[kPacks] = {};
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const unsigned place = lane + 32 * i;
      if (place >= packs) continue;
      const std::size_t from = at + place * kWide;
      x[i] = *reinterpret_cast<const uint4*>(call.x + from);
      dout[i] = *reinterpret_cast<const uint4*>(call.dout + from);
      if (call.before != nullptr) before[i] = *reinterpret_cast<const uint4*>(call.before + from);
    }
    float dot = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const unsigned place = lane + 32 * i;
      if (place >= packs) continue;
      float unit[kWide];  // x / rms(x)
      float given[kWide];
      float scale[kWide];
      unpack(x[i], unit);
      unpack(dout[i], given);
      load_floats(call.weight + place * kWide, scale);
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
        unit[j] *= rstd;
        dweight[i][j] += given[j] * unit[j];
        dot += given[j] * scale[j] * unit[j];
      }
    }
    const float mean = warp_sum(dot) / static_cast<float>(width);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const unsigned place = lane + 32 * i;
      if (place >= packs) continue;
      float unit[kWide];
      float given[kWide];
      float scale[kWide];
      float sum[kWide];
      unpack(x[i], unit);
      unpack(dout[i], given);
      unpack(before[i], sum);
      load_floats(call.weight + place * kWide, scale);
#pragma unroll
      for (int j = 0; j < kWide; ++j) {
        sum[j] += rstd * (given[j] * scale[j] - unit[j] * rstd * mean);
      }
      store(call.dx + at + place * kWide, sum);
    }
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const unsigned place = lane + 32 * i;
    if (place >= packs) continue;
#pragma unroll
    for (int j = 0; j < kWide; ++j) shared[warp * width + place * kWide + j] = dweight[i][j];
  }
  __syncthreads();
  for (unsigned column = threadIdx.x; column < width; column += blockDim.x) {
    float sum = 0;
    for (unsigned w = 0; w < kWarps; ++w) sum += shared[w * width + column];
    call.scratch[std::size_t{blockIdx.x} * width + column] = sum;
  }
}

constexpr int kSumRows = 8;

// The column sums of what the blocks left.
__global__ void __launch_bounds__(32 * kSumRows)
    sum_columns_kernel(unsigned width, const float* __restrict__ partials,
                       float* __restrict__ out) {
  __shared__ float shared[kSumRows][32];
  const unsigned column = blockIdx.x * 32 + threadIdx.x;
  float sum = 0;
  if (column < width) {
    for (unsigned row = threadIdx.y; row < kBlocks; row += kSumRows) {
      sum += partials[std::size_t{row} * width + column];
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  for (int i = 1; i < kSumRows; ++i) sum += shared[i][threadIdx.x];
  out[column] = sum;
}

// Calls `body` with the least number of packs per lane that is enough.
template <typename Body>
void with_packs(std::size_t packs, Body&& body) {
  const std::size_t per_lane = (packs + 31) / 32;
  if (per_lane <= 1) {
    body(std::integral_constant<int, 1>());
  } else if (per_lane <= 2) {
    body(std::integral_constant<int, 2>());
  } else if (per_lane <= 3) {
    body(std::integral_constant<int, 3>());
  } else if (per_lane <= 4) {
    body(std::integral_constant<int, 4>());
  } else if (per_lane <= 8) {
    body(std::integral_constant<int, 8>());
  } else {
    body(std::integral_constant<int, kMostPacks>());
  }
}

}  // namespace

std::size_t norm_scratch(std::size_t width) { return kBlocks * width; }

template <typename T>
void norm_forward(std::size_t rows, std::size_t width, const T* x, const float* weight, float eps,
                  T* out, float* rstd, cudaStream_t stream) {
  const std::size_t packs = width / kPack<T>;
  with_packs(packs, [&](auto count) {
    norm_forward_kernel<T, decltype(count)::value>
        <<<blocks_for(rows, kWarps), kWarps * 32, 0, stream>>>(
            static_cast<unsigned>(rows), static_cast<unsigned>(packs), x, weight, eps, out, rstd);
  });
  check_launch("norm_forward");
}

template <typename T>
void norm_backward(const NormBackward<T>& call, cudaStream_t stream) {
  const std::size_t packs = call.width / kPack<T>;
  const auto shared = static_cast<unsigned>(kWarps * call.width * sizeof(float));
  with_packs(packs, [&](auto count) {
    const auto kernel = norm_backward_kernel<T, decltype(count)::value>;
    allow_shared(reinterpret_cast<const void*>(kernel), shared);
    kernel<<<kBlocks, kWarps * 32, shared, stream>>>(call, static_cast<unsigned>(packs));
  });
  check_launch("norm_backward");
  sum_columns_kernel<<<blocks_for(call.width, 32), dim3(32, kSumRows), 0, stream>>>(
      static_cast<unsigned>(call.width), call.scratch, call.dweight);
  check_launch("norm_backward");
}

template void norm_forward(std::size_t, std::size_t, const float*, const float*, float, float*,
                           float*, cudaStream_t);
template void norm_forward(std::size_t, std::size_t, const __nv_bfloat16*, const float*, float,
                           __nv_bfloat16*, float*, cudaStream_t);
template void norm_backward(const NormBackward<float>&, cudaStream_t);
template void norm_backward(const NormBackward<__nv_bfloat16>&, cudaStream_t);

}  // namespace lockstep::cuda
