#include "lockstep/model/layout.h"

#include <fmt/format.h>

#include <array>

#include "lockstep/base/check.h"

namespace lockstep {
namespace {

// As the backward pass finishes them.
constexpr std::array<Component, kBlockComponents> kMemoryOrder = {
    Component::kDown,      Component::kGate,  Component::kUp,  Component::kPostAttentionNorm,
    Component::kOutput,    Component::kQuery, Component::kKey, Component::kValue,
    Component::kInputNorm,
};

// As LlamaForCausalLM declares them; Component lists the same order.
constexpr std::array<std::string_view, kBlockComponents> kNames = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "mlp.gate_proj",    "mlp.up_proj",
    "mlp.down_proj",    "input_layernorm",  "post_attention_layernorm",
};

bool is_norm(Component component) {
  return component == Component::kInputNorm || component == Component::kPostAttentionNorm ||
         component == Component::kFinalNorm;
}

struct Shape {
  std::int64_t rows;
  std::int64_t cols;
};

Shape shape_of(const ModelConfig& config, Component component) {
  switch (component) {
    case Component::kQuery:
    case Component::kOutput: return {config.hidden, config.hidden};
    case Component::kKey:
    case Component::kValue: return {config.kv_hidden(), config.hidden};
    case Component::kGate:
    case Component::kUp: return {config.intermediate, config.hidden};
    case Component::kDown: return {config.hidden, config.intermediate};
    case Component::kInputNorm:
    case Component::kPostAttentionNorm:
    case Component::kFinalNorm: return {config.hidden, 1};
    case Component::kLmHead:
    case Component::kEmbedding: return {config.vocab, config.hidden};
  }
  LOCKSTEP_CHECK(false);
}

TensorSpec spec_of(const ModelConfig& config, Component component, int block, std::string name) {
  const Shape shape = shape_of(config, component);
  return {.name = std::move(name),
          .component = component,
          .block = block,
          .rows = shape.rows,
          .cols = shape.cols,
          .range = {},
          .decay = !is_norm(component)};
}

}  // namespace

std::string_view to_string(Component component) {
  switch (component) {
    case Component::kQuery: return "w_q";
    case Component::kKey: return "w_k";
    case Component::kValue: return "w_v";
    case Component::kOutput: return "w_o";
    case Component::kGate: return "gate";
    case Component::kUp: return "up";
    case Component::kDown: return "down";
    case Component::kInputNorm: return "input_norm";
    case Component::kPostAttentionNorm: return "post_attn_norm";
    case Component::kLmHead: return "lm_head";
    case Component::kFinalNorm: return "final_norm";
    case Component::kEmbedding: return "embedding";
  }
  return "unknown";
}

ParameterLayout::ParameterLayout(const ModelConfig& config) : config_(config) {
  validate(config);
  tensors_.push_back(spec_of(config, Component::kEmbedding, -1, "model.embed_tokens.weight"));
  for (int block = 0; block < config.layers; ++block) {
    for (std::size_t i = 0; i < kNames.size(); ++i) {
      tensors_.push_back(spec_of(config, static_cast<Component>(i), block,
                                 fmt::format("model.layers.{}.{}.weight", block, kNames[i])));
    }
  }
  tensors_.push_back(spec_of(config, Component::kFinalNorm, -1, "model.norm.weight"));
  if (!config.tie_embeddings) {
    tensors_.push_back(spec_of(config, Component::kLmHead, -1, "lm_head.weight"));
  }

  const auto place = [this](TensorSpec& tensor) {
    const std::size_t begin = size_;
    size_ += static_cast<std::size_t>(tensor.rows * tensor.cols);
    tensor.range = {begin, size_};
  };
  if (!config.tie_embeddings) place(tensors_.back());
  place(tensors_[tensors_.size() - (config.tie_embeddings ? 1 : 2)]);
  for (int block = config.layers - 1; block >= 0; --block) {
    const std::size_t first = 1 + static_cast<std::size_t>(block) * kBlockComponents;
    for (const Component component : kMemoryOrder) {
      place(tensors_[first + static_cast<std::size_t>(component)]);
    }
  }
  place(tensors_.front());
}

Range ParameterLayout::range(Component component, int block) const {
  switch (component) {
    case Component::kEmbedding: return tensors_.front().range;
    case Component::kLmHead: return config_.tie_embeddings ? Range{} : tensors_.back().range;
    case Component::kFinalNorm:
      return tensors_[tensors_.size() - (config_.tie_embeddings ? 1 : 2)].range;
    default: break;
  }
  LOCKSTEP_CHECK(block >= 0 && block < config_.layers);
  return tensors_[1 + static_cast<std::size_t>(block) * kBlockComponents +
                  static_cast<std::size_t>(component)]
      .range;
}

}  // namespace lockstep
