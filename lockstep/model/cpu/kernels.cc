#include "lockstep/model/cpu/kernels.h"

#include "lockstep/base/processor.h"
#include "lockstep/model/cpu/kernels_levels.h"

namespace lockstep {

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
  const auto padded = [](std::size_t size) {
    return (size + kAttentionPad - 1) / kAttentionPad * kAttentionPad;
  };
  const std::size_t rows = padded(context);
  const std::size_t width = padded(head_dim);
  // Forward: keys, values, a block of queries and of results, and its scores. Backward: keys twice,
  // values, queries, the gradient that comes in, three that go out, two chunks of scores, and a
  // number per row.
  const std::size_t forward = 2 * rows * width + kQueryBlock * (2 * width + rows);
  const std::size_t backward = 8 * rows * width + 2 * kQueryBlock * kKeyChunk + rows;
  return forward > backward ? forward : backward;
}

}  // namespace lockstep
