#include <algorithm>

#include "lockstep/base/cuda/runtime.h"
#include "lockstep/model/cuda/kernels.h"
#include "lockstep/model/cuda/pack.cuh"

namespace lockstep::cuda {
namespace {

constexpr unsigned kThreads = 256;

template <typename T>
__global__ void embed_kernel(std::size_t total, unsigned packs,
                             const std::int32_t* __restrict__ ids, const T* __restrict__ table,
                             T* __restrict__ x) {
  const std::size_t index = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= total) return;
  const std::size_t from = static_cast<std::size_t>(ids[index / packs]) * packs + index % packs;
  reinterpret_cast<uint4*>(x)[index] = reinterpret_cast<const uint4*>(table)[from];
}

// One block per entry of the vocabulary.
template <typename T>
__global__ void embed_backward_kernel(unsigned packs, const std::uint32_t* __restrict__ begin,
                                      const std::uint32_t* __restrict__ places,
                                      const T* __restrict__ dx, bool add,
                                      float* __restrict__ dtable) {
  constexpr int kWide = kPack<T>;
  constexpr unsigned kAhead = 8;
  const std::size_t entry = blockIdx.x;
  const unsigned first = begin[entry];
  const unsigned last = begin[entry + 1];
  for (unsigned place = threadIdx.x; place < packs; place += blockDim.x) {
    float* out = dtable + (entry * packs + place) * kWide;
    float sum[kWide];
#pragma unroll
    for (int j = 0; j < kWide; ++j) sum[j] = add ? out[j] : 0.0F;
    for (unsigned i = first; i < last; i += kAhead) {
      float rows[kAhead][kWide];
#pragma unroll
      for (unsigned k = 0; k < kAhead; ++k) {
        if (i + k < last) load(dx + (std::size_t{places[i + k]} * packs + place) * kWide, rows[k]);
      }
#pragma unroll
      for (unsigned k = 0; k < kAhead; ++k) {
        if (i + k >= last) continue;
#pragma unroll
        for (int j = 0; j < kWide; ++j) sum[j] += rows[k][j];
      }
    }
#pragma unroll
    for (int j = 0; j < kWide; j += 4) {
      *reinterpret_cast<float4*>(out + j) = make_float4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3]);
    }
  }
}

// A thread rotates kWide pairs, whose halves are head_dim / 2 apart.
template <typename T, int kWide>
__global__ void rotate_kernel(Rotation call, unsigned total, T* __restrict__ values) {
  // 32 bits are enough, and division by them is much faster.
  const unsigned index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= total) return;
  const unsigned half = static_cast<unsigned>(call.head_dim) / 2;
  const unsigned groups = half / kWide;
  const unsigned group = index % groups;
  const unsigned heads = static_cast<unsigned>(call.heads);
  const unsigned token = index / groups / heads;
  const unsigned head = index / groups % heads;
  const unsigned table = token % static_cast<unsigned>(call.context) * half + group * kWide;
  T* low = values + token * call.stride + head * call.head_dim + group * kWide;
  T* high = low + half;
  float a[kWide];
  float b[kWide];
  float cosine[kWide];
  float sine[kWide];
  if constexpr (kWide == 1) {
    a[0] = to_float(*low);
    b[0] = to_float(*high);
    cosine[0] = call.cos[table];
    sine[0] = call.sin[table];
  } else {
    load(low, a);
    load(high, b);
    load_floats(call.cos + table, cosine);
    load_floats(call.sin + table, sine);
  }
  const float sign = call.inverse ? -1.0F : 1.0F;
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    const float turned = a[i] * cosine[i] - b[i] * (sign * sine[i]);
    b[i] = b[i] * cosine[i] + a[i] * (sign * sine[i]);
    a[i] = turned;
  }
  if constexpr (kWide == 1) {
    *low = from_float<T>(a[0]);
    *high = from_float<T>(b[0]);
  } else {
    store(low, a);
    store(high, b);
  }
}

template <typename T>
__device__ float sigmoid(float value) {
  if constexpr (sizeof(T) == 4) {
    return 1.0F / (1.0F + expf(-value));
  } else {
    return __fdividef(1.0F, 1.0F + __expf(-value));
  }
}

template <typename T>
__global__ void swiglu_forward_kernel(std::size_t total, unsigned packs,
                                      const T* __restrict__ gate_up, T* __restrict__ act) {
  constexpr int kWide = kPack<T>;
  const std::size_t index = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= total) return;
  const std::size_t at = ((index / packs) * 2 * packs + index % packs) * kWide;
  float gate[kWide];
  float up[kWide];
  load(gate_up + at, gate);
  load(gate_up + at + std::size_t{packs} * kWide, up);
#pragma unroll
  for (int i = 0; i < kWide; ++i) up[i] *= gate[i] * sigmoid<T>(gate[i]);
  store(act + index * kWide, up);
}

template <typename T>
__global__ void swiglu_backward_kernel(std::size_t total, unsigned packs, T* __restrict__ gate_up,
                                       const T* __restrict__ dact, T* __restrict__ act) {
  constexpr int kWide = kPack<T>;
  const std::size_t index = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= total) return;
  const std::size_t at = ((index / packs) * 2 * packs + index % packs) * kWide;
  T* up_at = gate_up + at + std::size_t{packs} * kWide;
  float gate[kWide];
  float up[kWide];
  float given[kWide];
  load(gate_up + at, gate);
  load(up_at, up);
  load(dact + index * kWide, given);
  float value[kWide];
#pragma unroll
  for (int i = 0; i < kWide; ++i) {
    const float share = sigmoid<T>(gate[i]);
    const float silu = gate[i] * share;
    value[i] = silu * up[i];
    gate[i] = given[i] * up[i] * (share + silu * (1.0F - share));
    up[i] = given[i] * silu;
  }
  store(gate_up + at, gate);
  store(up_at, up);
  if (act != nullptr) store(act + index * kWide, value);
}

}  // namespace

template <typename T>
void embed(std::size_t tokens, std::size_t width, const std::int32_t* ids, const T* table, T* x,
           cudaStream_t stream) {
  const std::size_t packs = width / kPack<T>;
  embed_kernel<<<blocks_for(tokens * packs, kThreads), kThreads, 0, stream>>>(
      tokens * packs, static_cast<unsigned>(packs), ids, table, x);
  check_launch("embed");
}

template <typename T>
void embed_backward(std::size_t vocab, std::size_t width, const std::uint32_t* begin,
                    const std::uint32_t* places, const T* dx, bool add, float* dtable,
                    cudaStream_t stream) {
  const std::size_t packs = width / kPack<T>;
  const unsigned threads = std::min(kThreads, blocks_for(packs, 32) * 32);
  embed_backward_kernel<<<static_cast<unsigned>(vocab), threads, 0, stream>>>(
      static_cast<unsigned>(packs), begin, places, dx, add, dtable);
  check_launch("embed_backward");
}

template <typename T>
void rotate(const Rotation& call, T* values, cudaStream_t stream) {
  const std::size_t pairs = call.tokens * call.heads * (call.head_dim / 2);
  if (call.head_dim / 2 % kPack<T> == 0) {
    const std::size_t total = pairs / kPack<T>;
    rotate_kernel<T, kPack<T>><<<blocks_for(total, kThreads), kThreads, 0, stream>>>(
        call, static_cast<unsigned>(total), values);
  } else {
    rotate_kernel<T, 1><<<blocks_for(pairs, kThreads), kThreads, 0, stream>>>(
        call, static_cast<unsigned>(pairs), values);
  }
  check_launch("rotate");
}

template <typename T>
void swiglu_forward(std::size_t rows, std::size_t width, const T* gate_up, T* act,
                    cudaStream_t stream) {
  const std::size_t packs = width / kPack<T>;
  swiglu_forward_kernel<<<blocks_for(rows * packs, kThreads), kThreads, 0, stream>>>(
      rows * packs, static_cast<unsigned>(packs), gate_up, act);
  check_launch("swiglu_forward");
}

template <typename T>
void swiglu_backward(std::size_t rows, std::size_t width, T* gate_up, const T* dact, T* act,
                     cudaStream_t stream) {
  const std::size_t packs = width / kPack<T>;
  swiglu_backward_kernel<<<blocks_for(rows * packs, kThreads), kThreads, 0, stream>>>(
      rows * packs, static_cast<unsigned>(packs), gate_up, dact, act);
  check_launch("swiglu_backward");
}

#define LOCKSTEP_ROWS(T)                                                                          \
  template void embed(std::size_t, std::size_t, const std::int32_t*, const T*, T*, cudaStream_t); \
  template void embed_backward(std::size_t, std::size_t, const std::uint32_t*,                    \
                               const std::uint32_t*, const T*, bool, float*, cudaStream_t);       \
  template void rotate(const Rotation&, T*, cudaStream_t);                                        \
  template void swiglu_forward(std::size_t, std::size_t, const T*, T*, cudaStream_t);             \
  template void swiglu_backward(std::size_t, std::size_t, T*, const T*, T*, cudaStream_t);
LOCKSTEP_ROWS(float)
LOCKSTEP_ROWS(__nv_bfloat16)

}  // namespace lockstep::cuda
