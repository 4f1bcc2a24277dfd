#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/data/tokenizer.h"
#include "lockstep/model/config.h"

namespace lockstep {

// config.json as Hugging Face's LlamaForCausalLM has it. Pure.

struct ConfigFile {
  ModelConfig model;
  std::string tokenizer;              // "bytes", "sentencepiece", "none"; empty: it does not say
  std::optional<std::int32_t> start;  // the token that comes before a document's first
};

// `tokenizer` may be none.
std::string config_json(const ModelConfig& model, const Tokenizer* tokenizer);

// Throws Error{kIo} that names `path` and the key.
ConfigFile parse_config_json(const std::string& path, std::string_view text);

}  // namespace lockstep
