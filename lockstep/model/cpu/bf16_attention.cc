#include "lockstep/model/cpu/bf16_attention.h"

#include <algorithm>

#include "lockstep/model/cpu/amx.h"
#include "lockstep/model/cpu/kernels_levels.h"

namespace lockstep {

const Bf16Attention* bf16_attention() {
#ifdef __x86_64__
  if (amx_bf16_available()) return &kBf16AttentionAmx;
#endif
  return nullptr;
}

const Bf16Attention* emulated_bf16_attention() {
#ifdef __x86_64__
  if (supported_model_kernels().front() == &kModelKernelsV4) return &kBf16AttentionEmulated;
#endif
  return nullptr;
}

std::size_t bf16_attention_scratch(std::size_t context, std::size_t head_dim) {
  const auto padded = [](std::size_t size) {
    return (size + kAttentionPad - 1) / kAttentionPad * kAttentionPad;
  };
  const std::size_t rows = padded(context);
  const std::size_t matrix = rows * padded(head_dim);
  const std::size_t block = kQueryBlock * padded(head_dim);
  // Forward: keys and values, half as large in bf16; a block of queries, before and after rounding,
  // and of results; scores and probabilities. Backward: seven matrices in bf16 and three gradients;
  // staged rows; a chunk of scores and of their gradient, and both rounded; a number per row.
  const std::size_t forward = matrix + 3 * block + 2 * kQueryBlock * rows;
  const std::size_t backward = 7 * matrix + 2 * block + 5 * kQueryBlock * kKeyChunk + rows;
  return std::max(forward, backward);
}

}  // namespace lockstep
