#include "lockstep/model/cuda/cuda_kernels.h"
#include "lockstep/base/cuda_launch.h"
#include "lockstep/model/cuda/cuda_pack.cuh"
#include "lockstep/model/norm.h"

namespace lockstep::cuda {
namespace {

constexpr unsigned kThreads = 256;

__global__ void add_kernel(std::size_t quads, float4* __restrict__ into,
                           const float4* __restrict__ from) {
  const std::size_t index = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= quads) return;
  const float4 a = into[index];
  const float4 b = from[index];
  into[index] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ uint2 rounded(const float4& value) {
  const __nv_bfloat162 low = __floats2bfloat162_rn(value.x, value.y);
  const __nv_bfloat162 high = __floats2bfloat162_rn(value.z, value.w);
  return {*reinterpret_cast<const unsigned*>(&low), *reinterpret_cast<const unsigned*>(&high)};
}

__global__ void round_kernel(std::size_t quads, const float4* __restrict__ values,
                             uint2* __restrict__ out) {
  const std::size_t index = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index < quads) out[index] = rounded(values[index]);
}

// A block takes a block.
__global__ void __launch_bounds__(kThreads)
    block_squares_kernel(std::size_t count, const float* __restrict__ values,
                         double* __restrict__ sums) {
  __shared__ double shared[kThreads];
  const std::size_t begin = std::size_t{blockIdx.x} * kNormBlock;
  double sum = 0;
#pragma unroll
  for (std::size_t i = 0; i < kNormBlock / kThreads / 4; ++i) {
    const std::size_t at = begin + (i * kThreads + threadIdx.x) * 4;
    if (at >= count) continue;
    const float4 four = *reinterpret_cast<const float4*>(values + at);
    sum += static_cast<double>(four.x) * four.x;
    sum += static_cast<double>(four.y) * four.y;
    sum += static_cast<double>(four.z) * four.z;
    sum += static_cast<double>(four.w) * four.w;
  }
  shared[threadIdx.x] = sum;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = shared[0];
}

// The operations of the CPU's kernel, in its order and each rounded: the intrinsics are never
// fused.
__device__ void update(const AdamWStep& step, float keep, float sum, float& parameter, float& first,
                       float& second) {
  const float g = __fmul_rn(sum, step.factor);
  first = __fadd_rn(__fmul_rn(step.beta1, first), __fmul_rn(step.rest1, g));
  second = __fadd_rn(__fmul_rn(step.beta2, second), __fmul_rn(step.rest2, __fmul_rn(g, g)));
  const float below = __fadd_rn(__fmul_rn(__fsqrt_rn(second), step.root_scale), step.eps);
  parameter = __fsub_rn(__fmul_rn(parameter, keep), __fdiv_rn(__fmul_rn(step.rate, first), below));
}

__global__ void __launch_bounds__(kThreads) adamw_kernel(AdamWStep step, const Piece* list) {
  const Piece piece = list[blockIdx.x];
  const float keep = piece.decay != 0 ? step.keep : 1.0F;
  const std::size_t own = piece.begin - step.first_element;
  for (std::size_t i = threadIdx.x * 4; i < piece.count; i += kThreads * 4) {
    auto* parameter_at = reinterpret_cast<float4*>(step.parameters + piece.begin + i);
    auto* first_at = reinterpret_cast<float4*>(step.first + own + i);
    auto* second_at = reinterpret_cast<float4*>(step.second + own + i);
    const float4 sum = *reinterpret_cast<const float4*>(step.sum + piece.begin + i);
    float4 parameter = *parameter_at;
    float4 first = *first_at;
    float4 second = *second_at;
    update(step, keep, sum.x, parameter.x, first.x, second.x);
    update(step, keep, sum.y, parameter.y, first.y, second.y);
    update(step, keep, sum.z, parameter.z, first.z, second.z);
    update(step, keep, sum.w, parameter.w, first.w, second.w);
    *parameter_at = parameter;
    *first_at = first;
    *second_at = second;
    if (step.rounded != nullptr) {
      *reinterpret_cast<uint2*>(step.rounded + piece.begin + i) = rounded(parameter);
    }
  }
}

}  // namespace

void add(std::size_t count, float* into, const float* from, cudaStream_t stream) {
  const std::size_t quads = count / 4;
  add_kernel<<<blocks_for(quads, kThreads), kThreads, 0, stream>>>(
      quads, reinterpret_cast<float4*>(into), reinterpret_cast<const float4*>(from));
  check_launch("add");
}

void round_to(std::size_t count, const float* values, __nv_bfloat16* out, cudaStream_t stream) {
  const std::size_t quads = count / 4;
  round_kernel<<<blocks_for(quads, kThreads), kThreads, 0, stream>>>(
      quads, reinterpret_cast<const float4*>(values), reinterpret_cast<uint2*>(out));
  check_launch("round_to");
}

void block_squares(std::size_t count, const float* values, double* sums, cudaStream_t stream) {
  block_squares_kernel<<<blocks_for(count, kNormBlock), kThreads, 0, stream>>>(count, values, sums);
  check_launch("block_squares");
}

void adamw(const AdamWStep& step, std::size_t pieces, const Piece* list, cudaStream_t stream) {
  adamw_kernel<<<static_cast<unsigned>(pieces), kThreads, 0, stream>>>(step, list);
  check_launch("adamw");
}

}  // namespace lockstep::cuda
