#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <memory>

#include "lockstep/model/config.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// Where the passes find the parameters, and what they are given and give back, all on the device.
struct CudaParameters {
  const float* master;
  const void* rounded;  // the same in bf16, in that precision
};
struct CudaBatch {
  const std::int32_t* tokens;
  const std::int32_t* targets;
  // The places of each vocabulary entry among the tokens; only the embedding's gradient needs them.
  const std::uint32_t* token_begin;
  const std::uint32_t* token_places;
};

// The forward and backward passes over batches of one shape, and the memory for them. Everything is
// enqueued; nothing waits.
class CudaPasses {
 public:
  struct Options {
    Precision precision = Precision::kBf16;
    int rows = 0;
    int context = 0;
    bool recompute = false;  // keep only the input of every block, and compute the rest once more
    bool plain_attention = false;  // never cuDNN's
  };
  // Called as work is enqueued: after the forward pass, and after what makes elements of the
  // gradient final. The ranges come in ascending order and cover everything but the embedding.
  struct Hooks {
    std::function<void()> forward_done;
    std::function<void(Range)> range_done;
  };

  virtual ~CudaPasses() = default;

  virtual void loss(const CudaParameters& parameters, const CudaBatch& batch,
                    cudaStream_t stream) = 0;
  // The logits of the token at `place`: vocab elements of the precision's type, until the next
  // call.
  virtual const void* logits(const CudaParameters& parameters, const CudaBatch& batch,
                             std::size_t place, cudaStream_t stream) = 0;
  // Loss and gradient, which overwrites `gradient`, but for the embedding.
  virtual void gradient(const CudaParameters& parameters, const CudaBatch& batch, float* gradient,
                        const Hooks& hooks, cudaStream_t stream) = 0;
  // After gradient().
  virtual void embedding_gradient(const CudaBatch& batch, float* gradient, cudaStream_t stream) = 0;

  // The sum of losses and the counts of tokens of what was enqueued last: a cuda::LossTotal.
  virtual const void* loss_total() const = 0;
  virtual std::size_t bytes() const = 0;
};

// Tokens whose logits are kept at the same time.
std::size_t logits_chunk(std::size_t tokens, std::size_t vocab, std::size_t element_bytes);

std::unique_ptr<CudaPasses> make_cuda_passes(const ParameterLayout& layout,
                                             const CudaPasses::Options& options);

}  // namespace lockstep
