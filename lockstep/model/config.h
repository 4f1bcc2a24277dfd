#pragma once

#include <optional>
#include <string_view>

namespace lockstep {

// The sizes of a Llama: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU.
struct ModelConfig {
  int vocab = 0;
  int hidden = 0;
  int layers = 0;
  int heads = 0;
  int kv_heads = 0;
  int intermediate = 0;
  int context = 0;  // the most positions a sequence may have
  float rope_theta = 10000.0f;
  float norm_eps = 1e-5f;
  bool tie_embeddings = false;

  int head_dim() const { return hidden / heads; }
  int kv_hidden() const { return kv_heads * head_dim(); }
  bool operator==(const ModelConfig&) const = default;
};

// Throws Error{kInvalidArgument} with one line that names the first value that cannot be.
void validate(const ModelConfig& config);

// The shapes that benchmarks know by name: tiny, small, 124m, 350m.
std::optional<ModelConfig> named_model(std::string_view name);

}  // namespace lockstep
