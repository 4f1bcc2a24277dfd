#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "lockstep/base/check.h"
#include "lockstep/base/cuda/runtime.h"
#include "lockstep/comm/nccl/combine.h"

namespace lockstep::cuda {
namespace {

constexpr unsigned kThreads = 256;
// A tree over leaves that 32 bits count is at most 32 levels high.
constexpr int kMostDepth = 33;

template <std::size_t Capacity>
struct Inputs {
  const float* data[Capacity];
  std::uint8_t adds[Capacity];  // how often the two on top are added once this one is there
  unsigned count;
};

__device__ float sum(float left, float right) { return __fadd_rn(left, right); }

__device__ float4 sum(const float4& left, const float4& right) {
  return make_float4(sum(left.x, right.x), sum(left.y, right.y), sum(left.z, right.z),
                     sum(left.w, right.w));
}

// A NaN that is computed is the one that the CPU's kernels give (kernels.h), not the GPU's.
__device__ float settled(float value) {
  return value == value ? value : __uint_as_float(0x7fc00000U);
}

__device__ float4 settled(const float4& value) {
  return make_float4(settled(value.x), settled(value.y), settled(value.z), settled(value.w));
}

// The stack moves, not its top: so every place is known at compile time and lies in a register.
template <typename Vector, int Depth, std::size_t Capacity>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ Inputs<Capacity> inputs, Vector* out,
                   std::size_t count) {
  const std::size_t index = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= count) return;
  const auto load = [&](unsigned k) {
    return reinterpret_cast<const Vector*>(inputs.data[k])[index];
  };
  Vector stack[Depth] = {};
  Vector next = load(0);
  for (unsigned k = 0; k < inputs.count; ++k) {
    const Vector value = next;
    if (k + 1 < inputs.count) next = load(k + 1);  // under way while this one is added
#pragma unroll
    for (int d = Depth - 1; d > 0; --d) stack[d] = stack[d - 1];
    stack[0] = value;
    for (unsigned adds = inputs.adds[k]; adds > 0; --adds) {
      stack[0] = sum(stack[1], stack[0]);
#pragma unroll
      for (int d = 1; d + 1 < Depth; ++d) stack[d] = stack[d + 1];
    }
  }
  out[index] = inputs.count > 1 ? settled(stack[0]) : stack[0];
}

template <typename Vector, int Depth, std::size_t Capacity>
void launch(const Inputs<Capacity>& inputs, float* out, std::size_t count, cudaStream_t stream) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  combine_kernel<Vector, Depth, Capacity>
      <<<blocks, kThreads, 0, stream>>>(inputs, reinterpret_cast<Vector*>(out), count);
  check_launch("combine");
}

bool aligned(const float* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

template <int Depth, std::size_t Capacity>
void combine_within(std::span<const CombineStep> program, std::span<const float* const> data,
                    float* out, std::size_t count, cudaStream_t stream) {
  Inputs<Capacity> inputs{};
  for (const CombineStep step : program) {
    if (step.push) {
      inputs.data[inputs.count] = data[inputs.count];
      ++inputs.count;
    } else {
      ++inputs.adds[inputs.count - 1];
    }
  }
  std::size_t quads = 0;
  if constexpr (Depth <= 16) {  // four times a deeper stack does not fit the registers
    if (aligned(out) && std::all_of(data.begin(), data.end(), aligned)) quads = count / 4;
    launch<float4, Depth>(inputs, out, quads, stream);
  }
  for (unsigned k = 0; k < inputs.count; ++k) inputs.data[k] += quads * 4;
  launch<float, Depth>(inputs, out + quads * 4, count - quads * 4, stream);
}

}  // namespace

void combine(std::span<const CombineStep> program, std::span<const float* const> inputs, float* out,
             std::size_t count, DeviceStream stream) {
  const auto pushes = std::count_if(program.begin(), program.end(),
                                    [](const CombineStep& step) { return step.push; });
  LOCKSTEP_CHECK(!inputs.empty() && inputs.size() == static_cast<std::size_t>(pushes));
  LOCKSTEP_CHECK(program.size() == 2 * inputs.size() - 1 && program.front().push);
  LOCKSTEP_CHECK(inputs.size() <= kMostInputs);
  const std::size_t depth = stack_depth(program);
  LOCKSTEP_CHECK(depth <= kMostDepth);
  // A launch copies all its parameters, so few inputs get a kernel with few.
  if (depth <= 2 && inputs.size() <= 16) {
    combine_within<2, 16>(program, inputs, out, count, stream);
  } else if (depth <= 4 && inputs.size() <= 32) {
    combine_within<4, 32>(program, inputs, out, count, stream);
  } else if (depth <= 8 && inputs.size() <= 256) {
    combine_within<8, 256>(program, inputs, out, count, stream);
  } else if (depth <= 16) {
    combine_within<16, kMostInputs>(program, inputs, out, count, stream);
  } else {
    combine_within<kMostDepth, kMostInputs>(program, inputs, out, count, stream);
  }
}

}  // namespace lockstep::cuda
