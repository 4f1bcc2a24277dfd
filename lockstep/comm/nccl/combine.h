#pragma once

#include <cstddef>
#include <span>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/comm/nccl/device_reducer.h"

namespace lockstep::cuda {

// How many vectors one call combines at most: they are kernel parameters.
inline constexpr std::size_t kMostInputs = 2048;

// out[i] = the sum of inputs[0][i], inputs[1][i], ... along `program` (combine_program()), each
// addition rounded to f32, for i < count: the bits of the CPU's reduce_tree(), NaN included. Reads
// every input once. `out` may be one of the inputs, which must not overlap it otherwise.
// Pointers need only be those of floats; it is faster when all are multiples of 16 bytes, with the
// same bits.
void combine(std::span<const CombineStep> program, std::span<const float* const> inputs, float* out,
             std::size_t count, DeviceStream stream);

}  // namespace lockstep::cuda
