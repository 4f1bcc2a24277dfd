#include "lockstep/model/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

// Rows of 64 bytes: every tensor of the flat buffer is then aligned without padding.
constexpr int kHiddenMultiple = 16;
constexpr int kLargest = 1 << 24;  // products of two sizes stay far inside 64 bits

struct NamedModel {
  std::string_view name;
  int vocab, hidden, layers, heads, kv_heads, intermediate, context;
};
constexpr NamedModel kNamedModels[] = {
    {"tiny", 4096, 256, 6, 8, 4, 768, 256},        {"small", 8192, 512, 8, 8, 8, 1408, 512},
    {"124m", 50304, 768, 12, 12, 12, 2048, 1024},  {"350m", 32768, 1024, 24, 16, 4, 4096, 1024},
    {"774m", 50304, 1280, 36, 20, 20, 3408, 1024}, {"1.5b", 50304, 1600, 48, 25, 25, 4272, 1024},
};

template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) {
  throw Error(ErrorCode::kInvalidArgument,
              "model: " + fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace

std::string_view to_string(Precision precision) {
  return precision == Precision::kF32 ? "fp32" : "bf16";
}

void validate(const ModelConfig& config) {
  const std::array<std::pair<const char*, int>, 7> sizes = {{{"vocab", config.vocab},
                                                             {"hidden", config.hidden},
                                                             {"layers", config.layers},
                                                             {"heads", config.heads},
                                                             {"kv_heads", config.kv_heads},
                                                             {"intermediate", config.intermediate},
                                                             {"context", config.context}}};
  for (const auto& [name, value] : sizes) {
    if (value < 1) refuse("{} is {}, and must be at least 1", name, value);
    if (value > kLargest) refuse("{} is {}, and may be at most {}", name, value, kLargest);
  }
  if (config.hidden % kHiddenMultiple != 0) {
    refuse("hidden is {}, and must be a multiple of {}", config.hidden, kHiddenMultiple);
  }
  if (config.hidden % config.heads != 0) {
    refuse("hidden {} cannot be shared by {} heads", config.hidden, config.heads);
  }
  if (config.head_dim() % 2 != 0) {
    refuse("a head has {} values, and rotary embeddings need an even number", config.head_dim());
  }
  if (config.heads % config.kv_heads != 0) {
    refuse("{} heads cannot share {} heads of keys and values evenly (--kv-heads)", config.heads,
           config.kv_heads);
  }
  if (!(config.rope_theta > 0.0f) || !std::isfinite(config.rope_theta)) {
    refuse("rope_theta is {}, and must be positive", config.rope_theta);
  }
  if (!(config.norm_eps > 0.0f) || !std::isfinite(config.norm_eps)) {
    refuse("norm_eps is {}, and must be positive", config.norm_eps);
  }
}

std::optional<ModelConfig> named_model(std::string_view name) {
  const auto* const named = std::ranges::find(kNamedModels, name, &NamedModel::name);
  if (named == std::end(kNamedModels)) return std::nullopt;
  return ModelConfig{.vocab = named->vocab,
                     .hidden = named->hidden,
                     .layers = named->layers,
                     .heads = named->heads,
                     .kv_heads = named->kv_heads,
                     .intermediate = named->intermediate,
                     .context = named->context};
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const NamedModel& named : kNamedModels) names.emplace_back(named.name);
  return names;
}

RotationAngles rotation_angles(const ModelConfig& config, std::size_t positions) {
  const auto half = static_cast<std::size_t>(config.head_dim() / 2);
  RotationAngles angles{std::vector<float>(positions * half), std::vector<float>(positions * half)};
  for (std::size_t i = 0; i < half; ++i) {
    const double exponent = static_cast<double>(2 * i) / static_cast<double>(config.head_dim());
    const auto frequency =
        static_cast<float>(1.0 / std::pow(static_cast<double>(config.rope_theta), exponent));
    for (std::size_t position = 0; position < positions; ++position) {
      const double angle = static_cast<float>(position) * frequency;
      angles.cos[position * half + i] = static_cast<float>(std::cos(angle));
      angles.sin[position * half + i] = static_cast<float>(std::sin(angle));
    }
  }
  return angles;
}

}  // namespace lockstep
