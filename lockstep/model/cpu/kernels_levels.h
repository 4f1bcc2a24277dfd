#pragma once

#include "lockstep/model/cpu/bf16_attention.h"
#include "lockstep/model/cpu/kernels.h"

namespace lockstep {

// Internal to kernels*.cc of this folder.

extern const ModelKernels kModelKernelsGeneric;
extern const ModelKernels kModelKernelsV3;  // defined for x86-64 only, as is the next
extern const ModelKernels kModelKernelsV4;

extern const Bf16Attention kBf16AttentionAmx;  // defined for x86-64 only, as is the next
extern const Bf16Attention kBf16AttentionEmulated;

constexpr std::size_t kAttentionPad = 64;  // rows and columns of attention's scratch: a multiple
constexpr std::size_t kQueryBlock = 64;
constexpr std::size_t kKeyChunk = 256;

}  // namespace lockstep
