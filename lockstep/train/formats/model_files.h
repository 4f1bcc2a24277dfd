#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/float_buffer.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/file_source.h"
#include "lockstep/model/config.h"
#include "lockstep/model/layout.h"
#include "lockstep/train/formats/safetensors.h"

namespace lockstep {

// The files of a trained model, as Hugging Face's LlamaForCausalLM has them: config.json,
// model.safetensors, and the tokenizer's files.

constexpr const char* kConfigFile = "config.json";
constexpr const char* kWeightsFile = "model.safetensors";
constexpr const char* kWeightsIndexFile = "model.safetensors.index.json";

// config.json.
struct ConfigFile {
  ModelConfig model;
  std::string tokenizer;              // "bytes", "sentencepiece", "bpe", "none"; empty: not said
  std::optional<std::int32_t> start;  // the token before the first one of a document
};
// `tokenizer` may be none. Pure.
std::string config_json(const ModelConfig& model, const Tokenizer* tokenizer);
// Throws Error{kIo} that names `path` and the key.
ConfigFile parse_config_json(const std::string& path, std::string_view text);

struct SavedModel {
  ModelConfig config;
  std::shared_ptr<const Tokenizer> tokenizer;  // none: the shards were made elsewhere
  std::string no_tokenizer;                    // why the one in a folder of others is not known
  std::optional<std::int32_t> start;           // the token before the first one of a document
  FloatBuffer parameters;                      // in the order of ParameterLayout(config)
  std::string weights = {};  // their hash, as save_model() left it in the file; empty: it did not
  std::string tokenizer_files = {};  // likewise, the tokenizer_hash()
};
// "blake3:<64 hex digits>": the BLAKE3 of the concatenated BLAKE3s of its files, in their order.
// Empty if it has none.
std::string tokenizer_hash(const Tokenizer* tokenizer);

// Writes the weights as f32. Each file appears complete or not at all, the weights last.
void save_model(const std::string& folder, const ParameterLayout& layout,
                std::span<const float> parameters, const Tokenizer* tokenizer, std::int64_t steps,
                const WriteGuard& guard = {}, Storage& storage = disk());

// Told the hash of a file of tensors that was read.
using OnHash = std::function<void(const std::string& name, const Blake3Hash& hash)>;
// Reads weights in f32, bf16 or f16, from one file or from several with an index. Throws Error{kIo}
// that names the file, and the tensor or the key, and when the weights are not those whose hash
// save_model() left. load_model() in train/checkpoint reads a folder.
SavedModel read_model(FileSource& files, const OnHash& on_hash = {});

// The tensors of a flat buffer, each named `prefix` + its name, in the order of files.
std::vector<TensorToStore> tensors_to_store(const ParameterLayout& layout,
                                            std::span<const float> values,
                                            const std::string& prefix = "");
// Where tensors so named go in a flat buffer. Throws Error{kIo} for one that is missing or of
// another size.
std::vector<SafetensorsFile::Target> targets_in(const ParameterLayout& layout,
                                                const SafetensorsFile& file,
                                                const std::string& prefix, std::span<float> values);

}  // namespace lockstep
