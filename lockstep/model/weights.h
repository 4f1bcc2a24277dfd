#pragma once

#include <cstddef>

#include "lockstep/model/layout.h"

namespace lockstep {

// Pointers into a flat buffer of parameters (const float) or gradients (float). Neighbouring
// tensors are one matrix: qkv is w_q, w_k and w_v; gate_up is gate and up.
template <typename Value>
class Weights {
 public:
  struct Block {
    Value *down, *gate_up, *post_attention_norm, *output, *qkv, *input_norm;
  };

  Weights(const ParameterLayout& layout, Value* flat) : layout_(layout), flat_(flat) {}

  Block block(int index) const {
    return {.down = at(Component::kDown, index),
            .gate_up = at(Component::kGate, index),
            .post_attention_norm = at(Component::kPostAttentionNorm, index),
            .output = at(Component::kOutput, index),
            .qkv = at(Component::kQuery, index),
            .input_norm = at(Component::kInputNorm, index)};
  }
  Value* embedding() const { return at(Component::kEmbedding, -1); }
  Value* final_norm() const { return at(Component::kFinalNorm, -1); }
  // The embedding, when it is tied.
  Value* lm_head() const {
    return layout_.config().tie_embeddings ? embedding() : at(Component::kLmHead, -1);
  }

 private:
  Value* at(Component component, int index) const {
    return flat_ + layout_.range(component, index).begin;
  }

  const ParameterLayout& layout_;
  Value* flat_;
};

}  // namespace lockstep
