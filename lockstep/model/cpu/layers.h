#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/base/float_buffer.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/model/config.h"
#include "lockstep/model/cpu/kernels.h"
#include "lockstep/model/cpu/matmul.h"

namespace lockstep {

// The layers of the model over all tokens of a batch, on a pool. Tokens are cut into fixed runs
// that any thread may take, and sums over tokens are taken in one order: the same bits for any
// threads. Matrices are row-major with one row per token. No heap after the first batch of the
// largest size.
class Layers {
 public:
  Layers(const ModelConfig& config, Precision precision, ThreadPool& pool, std::size_t max_tokens,
         std::size_t max_context);

  // x = the rows of `embedding` (vocab x hidden) that `tokens` name.
  void embed(std::span<const std::int32_t> tokens, const float* embedding, float* x);
  // dembedding = (or +=) the sum of the rows of dx, by token, in order.
  void embed_backward(std::span<const std::int32_t> tokens, const float* dx, bool add,
                      float* dembedding);

  void norm(const NormForward& call);
  // As the kernel, but `dweight` is overwritten.
  void norm_backward(const NormBackward& call);

  void swiglu(const SwigluForward& call);
  void swiglu_backward(const SwigluBackward& call);

  // Replaces logits by their gradients when `call.gradient`.
  void cross_entropy(const CrossEntropy& call);

  // y = x·wᵀ; w is out x in.
  struct Linear {
    std::size_t tokens, in, out;
  };
  void linear(const Linear& size, const float* x, const float* w, float* y);
  // dx = dy·w.
  void linear_backward(const Linear& size, const float* dy, const float* w, float* dx);
  // dw = (or +=) dyᵀ·x.
  void linear_weights(const Linear& size, const float* dy, const float* x, bool add, float* dw);

  // `rows` sequences of `context` tokens, whose queries, keys and values stand in rows of qkv: all
  // heads of q, then of k, then of v. lse: heads x context per sequence.
  void attention(std::size_t rows, std::size_t context, const float* qkv, float* out, float* lse);
  void attention_backward(std::size_t rows, std::size_t context, const float* qkv, const float* out,
                          const float* lse, const float* dout, float* dqkv);
  // `queries` more tokens of one sequence that has `first` already: their q comes from qkv, keys
  // and values of all first + queries from rows of `cache`, k then v.
  void attend_cache(std::size_t first, std::size_t queries, const float* qkv, const float* cache,
                    float* out, float* lse);

 private:
  template <typename Body>
  void for_rows(std::size_t rows, Body&& body);
  AttentionShape shape(std::size_t queries) const;

  ModelConfig config_;
  ThreadPool& pool_;
  Matmul matmul_;
  const ModelKernels& kernels_;
  void (*attention_forward_)(const AttentionForward&);
  void (*attention_backward_)(const AttentionBackward&);
  RotationAngles angles_;
  FloatBuffer norm_partials_;                // a row per run of tokens
  std::vector<FloatBuffer> scratch_;         // of attention, one per worker
  std::vector<std::uint32_t> token_begin_;   // per vocabulary entry: where its tokens begin in ...
  std::vector<std::uint32_t> token_places_;  // ... the places of the batch, sorted by token
};

}  // namespace lockstep
