#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// What matrix products multiply: f32, or bf16 (inputs rounded to nearest even) with f32 sums.
// Everything else is f32 in both.
enum class Precision { kF32, kBf16 };

std::string_view to_string(Precision precision);  // "fp32", "bf16"

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

// The shapes that go by a name: tiny, small, 124m, 350m, 774m and 1.5b. The numbers are those of
// parameters, about, with these vocabularies and tied embeddings.
std::optional<ModelConfig> named_model(std::string_view name);
std::vector<std::string> model_names();

// Cosines and sines of the rotary embedding, a row of head_dim / 2 per position. The angles are
// rounded to f32 as Hugging Face's implementation does.
struct RotationAngles {
  std::vector<float> cos, sin;
};
RotationAngles rotation_angles(const ModelConfig& config, std::size_t positions);

}  // namespace lockstep
