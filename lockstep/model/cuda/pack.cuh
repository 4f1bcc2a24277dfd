#pragma once

#include <cuda_bf16.h>

namespace lockstep::cuda {

// 16 bytes of T, as floats.
template <typename T>
constexpr int kPack = 16 / sizeof(T);

__device__ inline void unpack(const uint4& raw, float (&out)[4]) {
  out[0] = __uint_as_float(raw.x);
  out[1] = __uint_as_float(raw.y);
  out[2] = __uint_as_float(raw.z);
  out[3] = __uint_as_float(raw.w);
}

__device__ inline void unpack(const uint4& raw, float (&out)[8]) {
  const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000U);
  }
}

__device__ inline uint4 pack(const float (&in)[4]) {
  return {__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]),
          __float_as_uint(in[3])};
}

__device__ inline uint4 pack(const float (&in)[8]) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
    words[i] = *reinterpret_cast<const unsigned*>(&pair);
  }
  return {words[0], words[1], words[2], words[3]};
}

template <typename T>
__device__ void load(const T* from, float (&out)[kPack<T>]) {
  unpack(*reinterpret_cast<const uint4*>(from), out);
}

template <typename T>
__device__ void store(T* to, const float (&in)[kPack<T>]) {
  *reinterpret_cast<uint4*>(to) = pack(in);
}

// kCount floats from an address that is aligned to 16 bytes.
template <int kCount>
__device__ void load_floats(const float* from, float (&out)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    out[i] = four.x;
    out[i + 1] = four.y;
    out[i + 2] = four.z;
    out[i + 3] = four.w;
  }
}

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ T from_float(float value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else {
    return __float2bfloat16_rn(value);
  }
}

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffU, value, step);
  return value;
}

__device__ inline float warp_max(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffU, value, step));
  }
  return value;
}

inline unsigned blocks_for(std::size_t count, std::size_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

}  // namespace lockstep::cuda
