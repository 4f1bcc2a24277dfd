#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/float_buffer.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/files/file_source.h"
#include "lockstep/model/layout.h"
#include "lockstep/train/formats/safetensors.h"

namespace lockstep {

// A trained model as a folder: config.json and model.safetensors as Hugging Face's
// LlamaForCausalLM has them (f32), and tokenizer.model where the tokenizer has a file. Each file
// appears complete or not at all, the weights last.

constexpr const char* kConfigFile = "config.json";
constexpr const char* kWeightsFile = "model.safetensors";
constexpr const char* kWeightsIndexFile = "model.safetensors.index.json";

struct SavedModel {
  ModelConfig config;
  std::shared_ptr<const Tokenizer> tokenizer;  // none: it was trained on shards made elsewhere
  std::optional<std::int32_t> start;           // the token that comes before a document's first
  FloatBuffer parameters;                      // in the order of ParameterLayout(config)
};

void save_model(const std::string& folder, const ParameterLayout& layout,
                std::span<const float> parameters, const Tokenizer* tokenizer, std::int64_t steps);

// A folder that save_model() or a checkpoint left, or one of Hugging Face: weights in f32, bf16 or
// f16, in one file or in several with an index. Where there is a manifest the hashes of what is
// read are checked. Throws Error{kIo} that names the file, and the tensor or the key.
SavedModel load_model(const std::string& folder);

// The same from any files, without looking at a manifest.
SavedModel read_model(FileSource& files);

// The tensors of a flat buffer, each named `prefix` + its name, in the order of files.
std::vector<TensorToStore> tensors_to_store(const ParameterLayout& layout,
                                            std::span<const float> values,
                                            const std::string& prefix = "");
// Fills a flat buffer from tensors so named. Throws Error{kIo} for one that is missing or of
// another size.
void read_tensors(const ParameterLayout& layout, const SafetensorsView& file,
                  const std::string& prefix, std::span<float> values);

}  // namespace lockstep
