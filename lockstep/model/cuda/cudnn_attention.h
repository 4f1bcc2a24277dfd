#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "lockstep/model/gpu_memory.h"

namespace lockstep {

// Causal attention of `rows` sequences of `context` tokens. Rows of qkv hold the rotated queries of
// all heads, then keys, then values.
struct CudaAttentionShape {
  std::size_t rows, context;
  std::size_t heads, kv_heads, head_dim;

  std::size_t hidden() const { return heads * head_dim; }
  std::size_t qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
  bool operator==(const CudaAttentionShape&) const = default;
};

// cuDNN's fused attention in bf16, for one shape, with the deterministic backward pass, in as many
// calls as the scratch memory asks for (attention_rows()). Throws Error{kDevice} where cuDNN has
// none for the shape.
class CudnnAttention {
 public:
  explicit CudnnAttention(const CudaAttentionShape& shape, std::size_t scratch = kGpuScratch);
  ~CudnnAttention();

  // Bytes that `workspace` needs.
  std::size_t workspace_bytes() const;
  // lse: rows x heads x context.
  void forward(const void* qkv, void* out, float* lse, void* workspace, cudaStream_t stream);
  void backward(const void* qkv, const void* out, const float* lse, const void* dout, void* dqkv,
                void* workspace, cudaStream_t stream);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
