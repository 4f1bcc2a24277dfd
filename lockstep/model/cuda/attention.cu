#include "lockstep/base/cuda/runtime.h"
#include "lockstep/model/cuda/kernels.h"
#include "lockstep/model/cuda/pack.cuh"

namespace lockstep::cuda {
namespace {

// A warp takes a query (or a key, in the second half of the backward pass) and walks over the
// others 32 at a time: a lane per pair for the dot products, then a lane per element of the head
// for the sums.
constexpr unsigned kWarps = 4;
constexpr unsigned kMostWidth = 256;  // of a head
constexpr unsigned kMostPerLane = kMostWidth / 32;

struct Place {
  unsigned row, head, token;
};

__device__ Place place_of(std::size_t index, unsigned heads, unsigned context) {
  return {static_cast<unsigned>(index / context / heads),
          static_cast<unsigned>(index / context % heads), static_cast<unsigned>(index % context)};
}

// Where things lie, in elements.
struct Strides {
  explicit __device__ Strides(const CudaAttentionShape& shape)
      : context(static_cast<unsigned>(shape.context)),
        heads(static_cast<unsigned>(shape.heads)),
        group(static_cast<unsigned>(shape.heads / shape.kv_heads)),
        width(static_cast<unsigned>(shape.head_dim)),
        qkv((shape.heads + 2 * shape.kv_heads) * shape.head_dim),
        keys(shape.heads * shape.head_dim),
        values((shape.heads + shape.kv_heads) * shape.head_dim) {}

  unsigned context, heads, group, width;
  std::size_t qkv, keys, values;

  __device__ std::size_t query(unsigned row, unsigned head, unsigned token) const {
    return (std::size_t{row} * context + token) * qkv + head * width;
  }
  __device__ std::size_t key(unsigned row, unsigned kv_head, unsigned token) const {
    return query(row, kv_head, token) + keys;
  }
  __device__ std::size_t value(unsigned row, unsigned kv_head, unsigned token) const {
    return query(row, kv_head, token) + values;
  }
  __device__ std::size_t out(unsigned row, unsigned head, unsigned token) const {
    return (std::size_t{row} * context + token) * heads * width + head * width;
  }
  __device__ std::size_t per_token(unsigned row, unsigned head, unsigned token) const {
    return (std::size_t{row} * heads + head) * context + token;
  }
};

template <typename T>
__device__ float dot(const float* held, const T* other, unsigned width) {
  constexpr int kWide = kPack<T>;
  float sum = 0;
  for (unsigned d = 0; d < width; d += kWide) {
    float part[kWide];
    load(other + d, part);
#pragma unroll
    for (int j = 0; j < kWide; ++j) sum += held[d + j] * part[j];
  }
  return sum;
}

template <typename T>
__device__ void hold(const T* from, unsigned width, float* held) {
  for (unsigned d = threadIdx.x % 32; d < width; d += 32) held[d] = to_float(from[d]);
  __syncwarp();
}

// sums[d] += weight * from[d], for the elements of this lane.
template <typename T>
__device__ void accumulate(const T* from, unsigned width, float weight, float* sums) {
#pragma unroll
  for (unsigned i = 0; i < kMostPerLane; ++i) {
    const unsigned d = threadIdx.x % 32 + 32 * i;
    if (d < width) sums[i] += weight * to_float(from[d]);
  }
}

template <typename T>
__device__ void write(const float* sums, unsigned width, float factor, T* to) {
#pragma unroll
  for (unsigned i = 0; i < kMostPerLane; ++i) {
    const unsigned d = threadIdx.x % 32 + 32 * i;
    if (d < width) to[d] = from_float<T>(sums[i] * factor);
  }
}

template <typename T>
__global__ void __launch_bounds__(kWarps * 32)
    attention_forward_kernel(CudaAttentionShape shape, float scale, std::size_t total,
                             const T* __restrict__ qkv, T* __restrict__ out,
                             float* __restrict__ lse) {
  __shared__ float queries[kWarps][kMostWidth];
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  const std::size_t index = std::size_t{blockIdx.x} * kWarps + warp;
  if (index >= total) return;
  const Strides at(shape);
  const auto [row, head, token] = place_of(index, at.heads, at.context);
  const unsigned kv_head = head / at.group;
  hold(qkv + at.query(row, head, token), at.width, queries[warp]);
  float sums[kMostPerLane] = {};
  float highest = -INFINITY;
  float total_weight = 0;
  for (unsigned first = 0; first <= token; first += 32) {
    const unsigned key = first + lane;
    float score = -INFINITY;
    if (key <= token) {
      score = scale * dot(queries[warp], qkv + at.key(row, kv_head, key), at.width);
    }
    const float most = fmaxf(highest, warp_max(score));
    const float fade = expf(highest - most);
    const float weight = expf(score - most);
    total_weight = total_weight * fade + warp_sum(weight);
    highest = most;
#pragma unroll
    for (float& sum : sums) sum *= fade;
    const unsigned count = min(32U, token + 1 - first);
    for (unsigned k = 0; k < count; ++k) {
      accumulate(qkv + at.value(row, kv_head, first + k), at.width,
                 __shfl_sync(0xffffffffU, weight, static_cast<int>(k)), sums);
    }
  }
  write(sums, at.width, 1.0F / total_weight, out + at.out(row, head, token));
  if (lane == 0) lse[at.per_token(row, head, token)] = highest + logf(total_weight);
}

// delta and dq.
template <typename T>
__global__ void __launch_bounds__(kWarps * 32)
    attention_dq_kernel(CudaAttentionShape shape, float scale, std::size_t total,
                        const T* __restrict__ qkv, const T* __restrict__ out,
                        const float* __restrict__ lse, const T* __restrict__ dout,
                        float* __restrict__ delta_out, T* __restrict__ dqkv) {
  __shared__ float queries[kWarps][kMostWidth];
  __shared__ float givens[kWarps][kMostWidth];
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  const std::size_t index = std::size_t{blockIdx.x} * kWarps + warp;
  if (index >= total) return;
  const Strides at(shape);
  const auto [row, head, token] = place_of(index, at.heads, at.context);
  const unsigned kv_head = head / at.group;
  hold(qkv + at.query(row, head, token), at.width, queries[warp]);
  hold(dout + at.out(row, head, token), at.width, givens[warp]);
  float product = 0;
  for (unsigned d = lane; d < at.width; d += 32) {
    product += givens[warp][d] * to_float(out[at.out(row, head, token) + d]);
  }
  const float delta = warp_sum(product);
  const float log_sum = lse[at.per_token(row, head, token)];
  if (lane == 0) delta_out[at.per_token(row, head, token)] = delta;
  float sums[kMostPerLane] = {};
  for (unsigned first = 0; first <= token; first += 32) {
    const unsigned key = first + lane;
    float dscore = 0;
    if (key <= token) {
      const float score = scale * dot(queries[warp], qkv + at.key(row, kv_head, key), at.width);
      const float dweight = dot(givens[warp], qkv + at.value(row, kv_head, key), at.width);
      dscore = expf(score - log_sum) * (dweight - delta);
    }
    const unsigned count = min(32U, token + 1 - first);
    for (unsigned k = 0; k < count; ++k) {
      accumulate(qkv + at.key(row, kv_head, first + k), at.width,
                 __shfl_sync(0xffffffffU, dscore, static_cast<int>(k)), sums);
    }
  }
  write(sums, at.width, scale, dqkv + at.query(row, head, token));
}

// dk and dv, over the heads of the group and the queries that see the key, in order.
template <typename T>
__global__ void __launch_bounds__(kWarps * 32)
    attention_dkv_kernel(CudaAttentionShape shape, float scale, std::size_t total,
                         const T* __restrict__ qkv, const float* __restrict__ lse,
                         const float* __restrict__ delta, const T* __restrict__ dout,
                         T* __restrict__ dqkv) {
  __shared__ float keys[kWarps][kMostWidth];
  __shared__ float values[kWarps][kMostWidth];
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  const std::size_t index = std::size_t{blockIdx.x} * kWarps + warp;
  if (index >= total) return;
  const Strides at(shape);
  const auto [row, kv_head, token] =
      place_of(index, static_cast<unsigned>(shape.kv_heads), at.context);
  hold(qkv + at.key(row, kv_head, token), at.width, keys[warp]);
  hold(qkv + at.value(row, kv_head, token), at.width, values[warp]);
  float dk[kMostPerLane] = {};
  float dv[kMostPerLane] = {};
  for (unsigned head = kv_head * at.group; head < (kv_head + 1) * at.group; ++head) {
    for (unsigned first = token; first < at.context; first += 32) {
      const unsigned query = first + lane;
      float weight = 0;
      float dscore = 0;
      if (query < at.context) {
        const std::size_t per_token = at.per_token(row, head, query);
        const float score = scale * dot(keys[warp], qkv + at.query(row, head, query), at.width);
        weight = expf(score - lse[per_token]);
        dscore = weight *
                 (dot(values[warp], dout + at.out(row, head, query), at.width) - delta[per_token]);
      }
      const unsigned count = min(32U, at.context - first);
      for (unsigned k = 0; k < count; ++k) {
        const int from = static_cast<int>(k);
        accumulate(dout + at.out(row, head, first + k), at.width,
                   __shfl_sync(0xffffffffU, weight, from), dv);
        accumulate(qkv + at.query(row, head, first + k), at.width,
                   __shfl_sync(0xffffffffU, dscore, from), dk);
      }
    }
  }
  write(dk, at.width, scale, dqkv + at.key(row, kv_head, token));
  write(dv, at.width, 1.0F, dqkv + at.value(row, kv_head, token));
}

float scale_of(const CudaAttentionShape& shape) {
  return 1.0F / sqrtf(static_cast<float>(shape.head_dim));
}

}  // namespace

template <typename T>
void attention_forward(const CudaAttentionShape& shape, const T* qkv, T* out, float* lse,
                       cudaStream_t stream) {
  const std::size_t queries = shape.rows * shape.heads * shape.context;
  attention_forward_kernel<<<blocks_for(queries, kWarps), kWarps * 32, 0, stream>>>(
      shape, scale_of(shape), queries, qkv, out, lse);
  check_launch("attention_forward");
}

template <typename T>
void attention_backward(const CudaAttentionShape& shape, const T* qkv, const T* out,
                        const float* lse, const T* dout, float* delta, T* dqkv,
                        cudaStream_t stream) {
  const std::size_t queries = shape.rows * shape.heads * shape.context;
  const std::size_t keys = shape.rows * shape.kv_heads * shape.context;
  attention_dq_kernel<<<blocks_for(queries, kWarps), kWarps * 32, 0, stream>>>(
      shape, scale_of(shape), queries, qkv, out, lse, dout, delta, dqkv);
  attention_dkv_kernel<<<blocks_for(keys, kWarps), kWarps * 32, 0, stream>>>(
      shape, scale_of(shape), keys, qkv, lse, delta, dout, dqkv);
  check_launch("attention_backward");
}

#define LOCKSTEP_ATTENTION(T)                                                                     \
  template void attention_forward(const CudaAttentionShape&, const T*, T*, float*, cudaStream_t); \
  template void attention_backward(const CudaAttentionShape&, const T*, const T*, const float*,   \
                                   const T*, float*, T*, cudaStream_t);
LOCKSTEP_ATTENTION(float)
LOCKSTEP_ATTENTION(__nv_bfloat16)

}  // namespace lockstep::cuda
