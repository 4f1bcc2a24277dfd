#include "lockstep/train/formats/model_files.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/json.h"
#include "lockstep/files/mapped_file.h"
#include "lockstep/model/weights_hash.h"

namespace lockstep {
namespace {

constexpr const char* kWeightsHashKey = "lockstep_weights";
constexpr const char* kTokenizerHashKey = "lockstep_tokenizer_files";

std::string_view name_of(const Tokenizer* tokenizer) {
  if (tokenizer == nullptr) return "none";
  switch (tokenizer->kind()) {
    case TokenizerKind::kUnknown: break;
    case TokenizerKind::kBytes: return "bytes";
    case TokenizerKind::kSentencePiece: return "sentencepiece";
    case TokenizerKind::kBpe: return "bpe";
  }
  return "none";
}

Json config_of(const ModelConfig& config, const Tokenizer* tokenizer) {
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
      // Whose layout of keys this is. Without it transformers 5 warns that a large BPE is broken.
      {"transformers_version", "4.57.0"},
      {"lockstep_tokenizer", name_of(tokenizer)},
  };
  if (tokenizer != nullptr && tokenizer->end_of_document()) {
    // Where nothing begins a document, the end of the one before does.
    json["bos_token_id"] = tokenizer->start_of_document().value_or(*tokenizer->end_of_document());
    json["eos_token_id"] = *tokenizer->end_of_document();
  }
  return json;
}

// Reads values from a config.json. Throws Error{kIo} that names the key which is missing or wrong.
class ConfigReader {
 public:
  ConfigReader(std::string path, std::string_view text)
      : path_(std::move(path)), json_(parse_json(text)) {
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
    const auto wide = json_[key].get<double>();
    if (std::abs(wide) > std::numeric_limits<float>::max())
      throw_bad_file(path_, fmt::format("'{}' is too large", key));
    return static_cast<float>(wide);
  }
  // The object under `key`; an empty one when there is none.
  ConfigReader within(const char* key) const {
    return {path_, has(key) && json_[key].is_object() ? to_text(json_[key]) : "{}"};
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

// transformers 5 has rope_theta in rope_parameters, earlier versions at the top.
float read_rope_theta(const ConfigReader& reader, float otherwise) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const ConfigReader rope = reader.within(key);
    const bool plain = !rope.has("rope_type") || rope.text("rope_type") == "default";
    reader.require(!reader.has(key) || (plain && !rope.has("factor")),
                   fmt::format("{} is not supported", key));
  }
  return reader.within("rope_parameters")
      .number("rope_theta", reader.number("rope_theta", otherwise));
}

ModelConfig read_config(const ConfigReader& reader) {
  reader.require(reader.text("model_type") == "llama",
                 fmt::format("model_type '{}', not 'llama'", reader.text("model_type")));
  reader.require(!reader.has("hidden_act") || reader.text("hidden_act") == "silu",
                 fmt::format("hidden_act '{}', not 'silu'", reader.text("hidden_act")));
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
  config.rope_theta = read_rope_theta(reader, config.rope_theta);
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

std::shared_ptr<const Tokenizer> read_bpe(FileSource& files) {
  return bpe_tokenizer(files.text(kBpeFile), files.find_text(kBpeConfigFile).value_or(""),
                       files.path(kBpeFile));
}

// `problem`: weights of others are of use without their tokenizer, of which there are many kinds.
std::shared_ptr<const Tokenizer> read_tokenizer(FileSource& files, const ConfigFile& config,
                                                std::string& problem) {
  std::shared_ptr<const Tokenizer> tokenizer;
  if (config.tokenizer == "bytes") {
    tokenizer = byte_tokenizer();
  } else if (config.tokenizer == "sentencepiece" ||
             (config.tokenizer.empty() && files.find_size(kSentencePieceFile))) {
    tokenizer =
        sentencepiece_tokenizer(files.text(kSentencePieceFile), files.path(kSentencePieceFile));
  } else if (config.tokenizer == "bpe") {
    tokenizer = read_bpe(files);
  } else if (config.tokenizer.empty() && files.find_size(kBpeFile)) {
    try {
      tokenizer = read_bpe(files);
    } catch (const Error& error) {
      problem = error.message();
    }
  }
  if (tokenizer && tokenizer->vocab() > static_cast<std::uint32_t>(config.model.vocab)) {
    throw_bad_file(files.path(kConfigFile),
                   fmt::format("a vocabulary of {}, but the tokenizer has {}", config.model.vocab,
                               tokenizer->vocab()));
  }
  return tokenizer;
}

// The file of every tensor, from an index of Hugging Face.
std::map<std::string, std::string> read_index(const std::string& path, std::string_view text) {
  const auto json = parse_sorted_json(text);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    throw_bad_file(path, "there is no weight_map");
  }
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (!is_plain_name(name)) {
      throw_bad_file(path,
                     fmt::format("tensor '{}' is in '{}', which names no file", tensor, name));
    }
    files[tensor] = name;
  }
  return files;
}

void read_sharded(const ParameterLayout& layout, FileSource& files, std::span<float> values,
                  const OnHash& on_hash) {
  const std::string path = files.path(kWeightsIndexFile);
  const auto index = read_index(path, files.text(kWeightsIndexFile));
  struct Part {
    SafetensorsFile file;
    std::vector<SafetensorsFile::Target> targets = {};
  };
  std::map<std::string, Part> parts;
  for (const TensorSpec& tensor : layout.tensors()) {
    const auto place = index.find(tensor.name);
    if (place == index.end()) {
      throw_bad_file(path, fmt::format("tensor '{}' is missing", tensor.name));
    }
    const std::string& name = place->second;
    auto part = parts.find(name);
    if (part == parts.end()) part = parts.emplace(name, Part{SafetensorsFile(files, name)}).first;
    part->second.targets.push_back(part->second.file.target(
        tensor.name, values.subspan(tensor.range.begin, tensor.range.size())));
  }
  for (auto& [name, part] : parts) {
    const Blake3Hash hash = part.file.read(std::move(part.targets));
    if (on_hash) on_hash(name, hash);
  }
}

}  // namespace

std::string config_json(const ModelConfig& model, const Tokenizer* tokenizer) {
  return to_text(config_of(model, tokenizer), 2) + "\n";
}

ConfigFile parse_config_json(const std::string& path, std::string_view text) {
  const ConfigReader reader(path, text);
  ConfigFile config;
  config.model = read_config(reader);
  config.tokenizer = reader.text("lockstep_tokenizer");
  if (reader.has("bos_token_id")) {
    config.start = reader.integer("bos_token_id");
    reader.require(*config.start < config.model.vocab, "'bos_token_id' is beyond the vocabulary");
  }
  return config;
}

std::vector<TensorToStore> tensors_to_store(const ParameterLayout& layout,
                                            std::span<const float> values,
                                            const std::string& prefix) {
  std::vector<TensorToStore> tensors;
  for (const TensorSpec& tensor : layout.tensors()) {
    std::vector<std::int64_t> shape = {tensor.rows};
    if (tensor.cols != 1) shape.push_back(tensor.cols);
    tensors.push_back(
        {prefix + tensor.name, shape, values.subspan(tensor.range.begin, tensor.range.size())});
  }
  return tensors;
}

std::vector<SafetensorsFile::Target> targets_in(const ParameterLayout& layout,
                                                const SafetensorsFile& file,
                                                const std::string& prefix,
                                                std::span<float> values) {
  std::vector<SafetensorsFile::Target> targets;
  for (const TensorSpec& tensor : layout.tensors()) {
    targets.push_back(
        file.target(prefix + tensor.name, values.subspan(tensor.range.begin, tensor.range.size())));
  }
  return targets;
}

std::string tokenizer_hash(const Tokenizer* tokenizer) {
  std::vector<Blake3Hash> hashes;
  if (tokenizer != nullptr) {
    for (const TokenizerFile& file : tokenizer->files()) {
      hashes.push_back(blake3(std::as_bytes(std::span(file.bytes))));
    }
  }
  return hashes.empty() ? "" : to_weights_hash(hash_of_hashes(hashes));
}

void save_model(const std::string& folder, const ParameterLayout& layout,
                std::span<const float> parameters, const Tokenizer* tokenizer, std::int64_t steps,
                const WriteGuard& guard, Storage& storage) {
  make_folder(folder, storage);
  const std::string prefix = folder + "/";
  if (tokenizer != nullptr) {
    for (const TokenizerFile& file : tokenizer->files()) {
      write_file(prefix + file.name, file.bytes, guard, storage);
    }
  }
  write_file(prefix + kConfigFile, config_json(layout.config(), tokenizer), guard, storage);
  SafetensorsMetadata metadata = {{"format", "pt"},
                                  {"lockstep_steps", std::to_string(steps)},
                                  {kWeightsHashKey, weights_hash(layout, parameters)}};
  if (const std::string hash = tokenizer_hash(tokenizer); !hash.empty()) {
    metadata[kTokenizerHashKey] = hash;
  }
  write_safetensors(prefix + kWeightsFile, tensors_to_store(layout, parameters), metadata, guard,
                    storage);
}

SavedModel read_model(FileSource& files, const OnHash& on_hash) {
  const ConfigFile config = parse_config_json(files.path(kConfigFile), files.text(kConfigFile));
  SavedModel model;
  model.config = config.model;
  model.start = config.start;
  model.tokenizer = read_tokenizer(files, config, model.no_tokenizer);
  const ParameterLayout layout(model.config);
  if (!files.find_size(kWeightsFile) && files.find_size(kWeightsIndexFile)) {
    model.parameters = FloatBuffer::untouched(layout.size());
    read_sharded(layout, files, model.parameters.span(), on_hash);
    return model;
  }
  const SafetensorsFile file(files, kWeightsFile);
  if (layout.size() > files.size(kWeightsFile) / 2) {  // before so much memory is allocated
    throw_bad_file(file.path(), fmt::format("too small for {} parameters", layout.size()));
  }
  model.parameters = FloatBuffer::untouched(layout.size());
  const Blake3Hash hash = file.read(targets_in(layout, file, "", model.parameters.span()));
  if (on_hash) on_hash(kWeightsFile, hash);
  model.tokenizer_files = file.metadata(kTokenizerHashKey);
  model.weights = file.metadata(kWeightsHashKey);
  if (model.weights.empty()) return model;
  const std::string found = weights_hash(layout, model.parameters.span());
  if (found != model.weights) {
    throw_bad_file(file.path(), fmt::format("is damaged: weights {}, but {} were written", found,
                                            model.weights));
  }
  return model;
}

}  // namespace lockstep
