#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/range.h"
#include "lockstep/model/config.h"

namespace lockstep {

// What a tensor is: nine components per block, three of the whole model.
enum class Component {
  kQuery,
  kKey,
  kValue,
  kOutput,
  kGate,
  kUp,
  kDown,
  kInputNorm,
  kPostAttentionNorm,
  kLmHead,
  kFinalNorm,
  kEmbedding,
};
constexpr int kBlockComponents = 9;

// "w_q", "w_k", "w_v", "w_o", "gate", "up", "down", "input_norm", "post_attn_norm", "lm_head",
// "final_norm", "embedding".
std::string_view to_string(Component component);

struct TensorSpec {
  std::string name;  // Hugging Face's, e.g. "model.layers.0.self_attn.q_proj.weight"
  Component component;
  int block;  // -1 for tensors of the whole model
  std::int64_t rows;
  std::int64_t cols;  // 1 for norms, which are vectors
  Range range;        // row-major, in the flat buffers
  bool decay;         // whether weight decay applies
};

// Where each tensor lies in the flat buffers of parameters, gradients and moments. In memory they
// stand in the order in which the backward pass finishes them: lm_head, final_norm, the blocks from
// the last to the first (down, gate, up, post_attn_norm, w_o, w_q, w_k, w_v, input_norm),
// embedding. Without gaps, and every tensor begins on a multiple of 64 bytes when the buffer does.
// gate and up, and w_q, w_k and w_v, are neighbours, so that they are one matrix to a product.
class ParameterLayout {
 public:
  // Throws Error{kInvalidArgument} as validate() does.
  explicit ParameterLayout(const ModelConfig& config);

  const ModelConfig& config() const { return config_; }
  // In the order of Hugging Face's LlamaForCausalLM, which is that of files and hashes. Tied
  // embeddings are one tensor, the embedding; there is no lm_head then.
  std::span<const TensorSpec> tensors() const { return tensors_; }
  // Elements of a flat buffer, which is the number of parameters.
  std::size_t size() const { return size_; }
  // Of a component of block `block`, or of the whole model. Empty for the lm_head when it is tied.
  Range range(Component component, int block = -1) const;

 private:
  ModelConfig config_;
  std::vector<TensorSpec> tensors_;
  std::size_t size_ = 0;
};

}  // namespace lockstep
