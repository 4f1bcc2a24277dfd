#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

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

// cuDNN's fused attention in bf16, for one shape, with the deterministic backward pass. Throws
// Error{kIo} where cuDNN has none for the shape.
class CudnnAttention {
 public:
  explicit CudnnAttention(const CudaAttentionShape& shape);
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
