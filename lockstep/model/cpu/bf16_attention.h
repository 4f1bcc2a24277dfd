#pragma once

#include <cstddef>

#include "lockstep/model/cpu/kernels.h"

namespace lockstep {

// Attention whose products take bf16 and add in f32, on a matrix unit. Everything else (rotations,
// softmax, sums) is f32. The calls are those of ModelKernels.
struct Bf16Attention {
  void (*forward)(const AttentionForward& call);
  void (*backward)(const AttentionBackward& call);
};

// Null where the processor has no matrix unit for bf16.
const Bf16Attention* bf16_attention();
// The same without a matrix unit, slowly, for tests; null where there is not even AVX-512.
const Bf16Attention* emulated_bf16_attention();

// What both need as scratch, in floats.
std::size_t bf16_attention_scratch(std::size_t context, std::size_t head_dim);

}  // namespace lockstep
