#include "lockstep/train/model_files.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/data/atomic_file.h"
#include "lockstep/data/mapped_file.h"
#include "lockstep/data/shard_builder.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/train/safetensors.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kConfigFile = "config.json";
constexpr const char* kWeightsFile = "model.safetensors";

std::string in(const std::string& folder, const char* file) {
  return fmt::format("{}/{}", folder, file);
}

void write_file(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

std::string_view name_of(const Tokenizer* tokenizer) {
  if (tokenizer == nullptr) return "none";
  return tokenizer->kind() == TokenizerKind::kBytes ? "bytes" : "sentencepiece";
}

Json config_json(const ModelConfig& config, const Tokenizer* tokenizer) {
  Json json = {
      {"architectures", {"LlamaForCausalLM"}},
      {"model_type", "llama"},
      {"vocab_size", config.vocab},
      {"hidden_size", config.hidden},
      {"intermediate_size", config.intermediate},
      {"num_hidden_layers", config.layers},
      {"num_attention_heads", config.heads},
      {"num_key_value_heads", config.kv_heads},
      {"max_position_embeddings", config.context},
      {"rope_theta", config.rope_theta},
      {"rms_norm_eps", config.norm_eps},
      {"tie_word_embeddings", config.tie_embeddings},
      {"hidden_act", "silu"},
      {"attention_bias", false},
      {"mlp_bias", false},
      {"torch_dtype", "float32"},
      {"lockstep_tokenizer", name_of(tokenizer)},
  };
  if (tokenizer != nullptr && tokenizer->end_of_document()) {
    json["bos_token_id"] = *tokenizer->end_of_document();  // documents stand end to end
    json["eos_token_id"] = *tokenizer->end_of_document();
  }
  return json;
}

// Reads values out of a config.json; what is missing or of another type is told with its key.
class ConfigReader {
 public:
  explicit ConfigReader(std::string path) : path_(std::move(path)) {
    const MappedFile file(path_);
    const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                                file.bytes().size());
    json_ = Json::parse(text, nullptr, false);
    if (!json_.is_object()) throw_bad_file(path_, "not a JSON object");
  }

  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }
  int integer(const char* key) const {
    if (!has(key) || !json_[key].is_number_integer())
      throw_bad_file(path_, fmt::format("'{}' is not a whole number", key));
    const auto value = json_[key].get<std::int64_t>();
    if (value < 0 || value > (1 << 30))
      throw_bad_file(path_, fmt::format("'{}' is {}", key, value));
    return static_cast<int>(value);
  }
  int integer(const char* key, int otherwise) const { return has(key) ? integer(key) : otherwise; }
  float number(const char* key, float otherwise) const {
    if (!has(key)) return otherwise;
    if (!json_[key].is_number()) throw_bad_file(path_, fmt::format("'{}' is not a number", key));
    return json_[key].get<float>();
  }
  bool flag(const char* key) const {
    return has(key) && json_[key].is_boolean() && json_[key].get<bool>();
  }
  std::string text(const char* key) const {
    return has(key) && json_[key].is_string() ? json_[key].get<std::string>() : std::string();
  }
  void require(bool condition, const std::string& what) const {
    if (!condition) throw_bad_file(path_, what);
  }

 private:
  std::string path_;
  Json json_;
};

ModelConfig read_config(const ConfigReader& reader) {
  reader.require(reader.text("model_type") == "llama",
                 fmt::format("model_type '{}', not 'llama'", reader.text("model_type")));
  reader.require(!reader.has("rope_scaling"), "rope_scaling is not supported");
  reader.require(!reader.flag("attention_bias") && !reader.flag("mlp_bias"),
                 "biases are not supported");
  ModelConfig config;
  config.vocab = reader.integer("vocab_size");
  config.hidden = reader.integer("hidden_size");
  config.intermediate = reader.integer("intermediate_size");
  config.layers = reader.integer("num_hidden_layers");
  config.heads = reader.integer("num_attention_heads");
  config.kv_heads = reader.integer("num_key_value_heads", config.heads);
  config.context = reader.integer("max_position_embeddings");
  config.rope_theta = reader.number("rope_theta", config.rope_theta);
  config.norm_eps = reader.number("rms_norm_eps", config.norm_eps);
  config.tie_embeddings = reader.flag("tie_word_embeddings");
  try {
    validate(config);
  } catch (const Error& error) {
    reader.require(false, std::string(error.message()));
  }
  reader.require(reader.integer("head_dim", config.head_dim()) == config.head_dim(),
                 "head_dim is not hidden_size / num_attention_heads");
  return config;
}

}  // namespace

void save_model(const std::string& folder, const ParameterLayout& layout,
                std::span<const float> parameters, const Tokenizer* tokenizer, std::int64_t steps) {
  make_folder(folder);
  if (tokenizer != nullptr && !tokenizer->model().empty()) {
    write_file(in(folder, kTokenizerFile), tokenizer->model());
  }
  write_file(in(folder, kConfigFile), config_json(layout.config(), tokenizer).dump(2) + "\n");
  std::vector<TensorToStore> tensors;
  for (const TensorSpec& tensor : layout.tensors()) {
    std::vector<std::int64_t> shape = {tensor.rows};
    if (tensor.cols != 1) shape.push_back(tensor.cols);
    tensors.push_back(
        {tensor.name, shape, parameters.subspan(tensor.range.begin, tensor.range.size())});
  }
  write_safetensors(in(folder, kWeightsFile), tensors,
                    {{"format", "pt"},
                     {"lockstep_steps", std::to_string(steps)},
                     {"lockstep_weights", weights_hash(layout, parameters)}});
}

SavedModel load_model(const std::string& folder) {
  const ConfigReader reader(in(folder, kConfigFile));
  SavedModel model;
  model.config = read_config(reader);
  if (reader.has("bos_token_id")) {
    model.start = reader.integer("bos_token_id");
    reader.require(*model.start < model.config.vocab, "'bos_token_id' is beyond the vocabulary");
  }
  const std::string tokenizer = reader.text("lockstep_tokenizer");
  const std::string tokenizer_path = in(folder, kTokenizerFile);
  if (tokenizer == "bytes") {
    model.tokenizer = byte_tokenizer();
  } else if (tokenizer == "sentencepiece" || std::filesystem::exists(tokenizer_path)) {
    const MappedFile file(tokenizer_path);
    model.tokenizer = sentencepiece_tokenizer(
        {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()}, tokenizer_path);
  }
  if (model.tokenizer) {
    reader.require(model.tokenizer->vocab() <= static_cast<std::uint32_t>(model.config.vocab),
                   fmt::format("a vocabulary of {}, but the tokenizer has {}", model.config.vocab,
                               model.tokenizer->vocab()));
  }

  const std::string path = in(folder, kWeightsFile);
  const SafetensorsFile file(path);
  const ParameterLayout layout(model.config);
  model.parameters = FloatBuffer(layout.size());
  for (const TensorSpec& tensor : layout.tensors()) {
    const StoredTensor* stored = file.find(tensor.name);
    if (stored == nullptr) throw_bad_file(path, fmt::format("tensor '{}' is missing", tensor.name));
    file.read(*stored, model.parameters.span().subspan(tensor.range.begin, tensor.range.size()));
  }
  return model;
}

}  // namespace lockstep
