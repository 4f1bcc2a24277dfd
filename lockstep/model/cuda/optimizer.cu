#include "lockstep/base/cuda/runtime.h"
#include "lockstep/model/cuda/kernels.h"
#include "lockstep/model/cuda/pack.cuh"
#include "lockstep/model/update.h"

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

constexpr unsigned kTreeGroup = 1024;  // a power of two, so that a group is a node of the tree

// A block adds a group: neighbours first, then neighbouring pairs, and so on.
__global__ void __launch_bounds__(kTreeGroup / 2)
    tree_kernel(std::size_t count, const double* __restrict__ values, double* __restrict__ sums) {
  __shared__ double shared[kTreeGroup];
  const std::size_t begin = std::size_t{blockIdx.x} * kTreeGroup;
  const auto size = static_cast<unsigned>(min(std::size_t{kTreeGroup}, count - begin));
  for (unsigned i = threadIdx.x; i < size; i += blockDim.x) shared[i] = values[begin + i];
  for (unsigned step = 1; step < kTreeGroup; step *= 2) {
    __syncthreads();
    const unsigned left = 2 * step * threadIdx.x;
    if (left + step < size) shared[left] += shared[left + step];
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = shared[0];
}

__global__ void decide_update_kernel(const double* squares, const std::uint32_t* bad_losses,
                                     UpdateState* state) {
  const double norm = squares != nullptr ? __dsqrt_rn(*squares) : state->norm;
  double scale = 1.0;
  if (state->clip > 0.0) {
    const double clipped = __ddiv_rn(state->clip, __ddiv_rn(norm, state->tokens));
    if (clipped < scale) scale = clipped;
  }
  state->norm = norm;
  state->factor = __double2float_rn(__ddiv_rn(scale, state->tokens));
  state->apply = isfinite(norm) && *bad_losses == 0 && state->tokens > 0.0 ? 1 : 0;
}

// The operations of the CPU's kernel, in its order and each rounded: the intrinsics are never
// fused.
__device__ void update(const AdamWStep& step, const UpdateState& state, float keep, float sum,
                       float& parameter, float& first, float& second) {
  const float g = __fmul_rn(sum, state.factor);
  first = __fadd_rn(__fmul_rn(step.beta1, first), __fmul_rn(step.rest1, g));
  second = __fadd_rn(__fmul_rn(step.beta2, second), __fmul_rn(step.rest2, __fmul_rn(g, g)));
  const float below = __fadd_rn(__fmul_rn(__fsqrt_rn(second), state.root_scale), step.eps);
  parameter = __fsub_rn(__fmul_rn(parameter, keep), __fdiv_rn(__fmul_rn(state.rate, first), below));
}

__global__ void __launch_bounds__(kThreads) adamw_kernel(AdamWStep step, const Piece* list) {
  const UpdateState state = *step.state;
  if (state.apply == 0) return;
  const Piece piece = list[blockIdx.x];
  const float keep = piece.decay != 0 ? state.keep : 1.0F;
  const std::size_t own = piece.begin - step.first_element;
  for (std::size_t i = threadIdx.x * 4; i < piece.count; i += kThreads * 4) {
    auto* parameter_at = reinterpret_cast<float4*>(step.parameters + piece.begin + i);
    auto* first_at = reinterpret_cast<float4*>(step.first + own + i);
    auto* second_at = reinterpret_cast<float4*>(step.second + own + i);
    const float4 sum = *reinterpret_cast<const float4*>(step.sum + piece.begin + i);
    float4 parameter = *parameter_at;
    float4 first = *first_at;
    float4 second = *second_at;
    update(step, state, keep, sum.x, parameter.x, first.x, second.x);
    update(step, state, keep, sum.y, parameter.y, first.y, second.y);
    update(step, state, keep, sum.z, parameter.z, first.z, second.z);
    update(step, state, keep, sum.w, parameter.w, first.w, second.w);
    *parameter_at = parameter;
    *first_at = first;
    *second_at = second;
    if (step.rounded != nullptr) {
      *reinterpret_cast<uint2*>(step.rounded + piece.begin + i) = rounded(parameter);
    }
  }
}

}  // namespace

bool has_code_for_gpu() {
  cudaFuncAttributes attributes{};
  const bool has = cudaFuncGetAttributes(&attributes, add_kernel) == cudaSuccess;
  static_cast<void>(cudaGetLastError());
  return has;
}

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

std::size_t tree_scratch(std::size_t count) {
  std::size_t total = 0;
  do {
    count = blocks_for(count, kTreeGroup);
    total += count;
  } while (count > 1);
  return total;
}

const double* tree_sum(std::size_t count, const double* values, double* scratch,
                       cudaStream_t stream) {
  do {
    const unsigned groups = blocks_for(count, kTreeGroup);
    tree_kernel<<<groups, kTreeGroup / 2, 0, stream>>>(count, values, scratch);
    check_launch("tree_sum");
    values = scratch;
    scratch += groups;
    count = groups;
  } while (count > 1);
  return values;
}

void decide_update(const double* squares, const std::uint32_t* bad_losses, UpdateState* state,
                   cudaStream_t stream) {
  decide_update_kernel<<<1, 1, 0, stream>>>(squares, bad_losses, state);
  check_launch("decide_update");
}

void adamw(const AdamWStep& step, std::size_t pieces, const Piece* list, cudaStream_t stream) {
  if (pieces == 0) return;
  adamw_kernel<<<static_cast<unsigned>(pieces), kThreads, 0, stream>>>(step, list);
  check_launch("adamw");
}

}  // namespace lockstep::cuda
