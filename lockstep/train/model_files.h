#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "lockstep/base/float_buffer.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// A trained model as a folder: config.json and model.safetensors as Hugging Face's
// LlamaForCausalLM has them (f32), and tokenizer.model where the tokenizer has a file. Each file
// appears complete or not at all, the weights last.

struct SavedModel {
  ModelConfig config;
  std::shared_ptr<const Tokenizer> tokenizer;  // none: it was trained on shards made elsewhere
  std::optional<std::int32_t> start;           // the token that comes before a document's first
  FloatBuffer parameters;                      // in the order of ParameterLayout(config)
};

void save_model(const std::string& folder, const ParameterLayout& layout,
                std::span<const float> parameters, const Tokenizer* tokenizer, std::int64_t steps);

// Throws Error{kIo} that names the file, and the tensor or the key.
SavedModel load_model(const std::string& folder);

}  // namespace lockstep
