#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/base/float_buffer.h"
#include "lockstep/base/index.h"
#include "lockstep/model/batch.h"
#include "lockstep/model/cpu/layers.h"
#include "lockstep/model/layout.h"
#include "lockstep/model/weights.h"

namespace lockstep {

// What Transformer runs: the passes over one batch at a time, and the memory for them. Callers have
// checked the batch. With `recompute` only the input of every block is kept, and the backward pass
// computes the rest once more, to the same bits.
class Passes {
 public:
  Passes(const ParameterLayout& layout, Precision precision, ThreadPool& pool,
         std::size_t max_tokens, std::size_t max_context, bool recompute);

  // Leaves the input of the lm_head, the gate_up of every block and the like for what follows.
  void forward(const Weights<const float>& weights, const Batch& batch);
  // After forward(): writes the logits of all tokens.
  void logits(const Weights<const float>& weights, float* out);
  // After forward().
  LossSum loss(const Weights<const float>& weights, const Batch& batch);
  // After forward(): the loss, and every gradient.
  LossSum backward(const Weights<const float>& weights, const Batch& batch,
                   const Weights<float>& gradient, const RangeReady& ready);

 private:
  // What the backward pass needs from a block besides its input; one row per token.
  struct BlockMemory {
    FloatBuffer input_rstd, normed_input;  // of attention
    FloatBuffer qkv, lse, attended;
    FloatBuffer middle, middle_rstd, normed_middle;  // the input of the MLP
    FloatBuffer gate_up;
  };
  using Parameters = Weights<const float>::Block;
  using Gradients = Weights<float>::Block;

  Layers::Linear size(std::size_t in, std::size_t out) const { return {tokens_, in, out}; }
  BlockMemory& memory(int index) { return blocks_[recompute_ ? 0 : index_of(index)]; }
  void forward_block(int index, const Parameters& weights, const float* stream, const float* added);
  LossSum heads(const Weights<const float>& weights, const Batch& batch, float* dlm_head);
  void backward_mlp(int index, const Parameters& weights, const Gradients& gradient,
                    const RangeReady& ready);
  void backward_attention(int index, const Parameters& weights, const Gradients& gradient,
                          const RangeReady& ready);
  void tell(const RangeReady& ready, Component first, Component last, int block = -1) const;

  const ParameterLayout& layout_;
  std::size_t hidden_, qkv_width_, intermediate_, vocab_;
  std::size_t chunk_;  // tokens whose logits are in memory at the same time
  Layers layers_;
  std::size_t rows_ = 0, context_ = 0, tokens_ = 0;  // of the batch at hand

  const bool recompute_;
  std::vector<FloatBuffer> inputs_;  // of the blocks
  std::vector<BlockMemory> blocks_;  // one for all when what they hold is computed once more
  FloatBuffer sublayer_;             // what attention or the MLP adds to the residual stream
  FloatBuffer act_;
  FloatBuffer output_, output_rstd_, normed_output_;
  FloatBuffer logits_;
  std::vector<double> losses_;         // one per token
  std::vector<std::uint8_t> correct_;  // as in CrossEntropy, one per token
  FloatBuffer dx_;                     // of the residual stream
  FloatBuffer dnormed_, dact_, dqkv_;
};

}  // namespace lockstep
