#include "lockstep/model/cpu/kernels.h"

#include <algorithm>

#include "lockstep/base/processor.h"

namespace lockstep {
namespace {

std::size_t padded(std::size_t size) {
  return (size + kAttentionPad - 1) / kAttentionPad * kAttentionPad;
}

}  // namespace

std::vector<const ModelKernels*> supported_model_kernels() {
  std::vector<const ModelKernels*> kernels;
#ifdef __x86_64__
  if (runs_x86_64_v4()) kernels.push_back(&kModelKernelsV4);
  if (runs_x86_64_v3()) kernels.push_back(&kModelKernelsV3);
#endif
  kernels.push_back(&kModelKernelsGeneric);
  return kernels;
}

const ModelKernels& best_model_kernels() {
  static const ModelKernels& best = *supported_model_kernels().front();
  return best;
}

std::size_t attention_scratch(std::size_t context, std::size_t head_dim) {
  const std::size_t rows = padded(context);
  const std::size_t width = padded(head_dim);
  // Forward: keys, values, a block of queries and of results, and its scores. Backward: keys twice,
  // values, queries, the gradient that comes in, three that go out, two chunks of scores, and a
  // number per row.
  const std::size_t forward = 2 * rows * width + kQueryBlock * (2 * width + rows);
  const std::size_t backward = 8 * rows * width + 2 * kQueryBlock * kKeyChunk + rows;
  return std::max(forward, backward);
}

const Bf16Attention* bf16_attention() {
#ifdef __x86_64__
  if (runs_amx_bf16()) return &kBf16AttentionAmx;
#endif
  return nullptr;
}

const Bf16Attention* emulated_bf16_attention() {
#ifdef __x86_64__
  if (runs_x86_64_v4()) return &kBf16AttentionEmulated;
#endif
  return nullptr;
}

std::size_t bf16_attention_scratch(std::size_t context, std::size_t head_dim) {
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
