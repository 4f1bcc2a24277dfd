#include "lockstep/train/formats/model_files.h"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/data/shard_builder.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/train/checkpoint/checkpoint_files.h"
#include "lockstep/train/formats/config_json.h"

namespace lockstep {
namespace {

void write_file(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

std::shared_ptr<const Tokenizer> read_tokenizer(FileSource& files, const ConfigFile& config) {
  std::shared_ptr<const Tokenizer> tokenizer;
  if (config.tokenizer == "bytes") {
    tokenizer = byte_tokenizer();
  } else if (config.tokenizer == "sentencepiece" || files.find(kTokenizerFile)) {
    tokenizer = sentencepiece_tokenizer(std::string(as_text(files.get(kTokenizerFile))),
                                        files.path(kTokenizerFile));
  }
  if (tokenizer && tokenizer->vocab() > static_cast<std::uint32_t>(config.model.vocab)) {
    throw_bad_file(files.path(kConfigFile),
                   fmt::format("a vocabulary of {}, but the tokenizer has {}", config.model.vocab,
                               tokenizer->vocab()));
  }
  return tokenizer;
}

void read_tensor(const SafetensorsView& file, const std::string& name, std::span<float> values) {
  const StoredTensor* stored = file.find(name);
  if (stored == nullptr) throw_bad_file(file.path(), fmt::format("tensor '{}' is missing", name));
  file.read(*stored, values);
}

// The file of each tensor, as an index of Hugging Face's says.
std::map<std::string, std::string> read_index(const std::string& path, std::string_view text) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
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

void read_sharded(const ParameterLayout& layout, FileSource& files, std::span<float> values) {
  const std::string path = files.path(kWeightsIndexFile);
  const auto index = read_index(path, as_text(files.get(kWeightsIndexFile)));
  std::map<std::string, SafetensorsView> open;
  for (const TensorSpec& tensor : layout.tensors()) {
    const auto place = index.find(tensor.name);
    if (place == index.end()) {
      throw_bad_file(path, fmt::format("tensor '{}' is missing", tensor.name));
    }
    const std::string& name = place->second;
    if (!open.contains(name)) {
      open.emplace(name, SafetensorsView(files.path(name), files.get(name)));
    }
    read_tensor(open.at(name), tensor.name,
                values.subspan(tensor.range.begin, tensor.range.size()));
  }
}

}  // namespace

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

void read_tensors(const ParameterLayout& layout, const SafetensorsView& file,
                  const std::string& prefix, std::span<float> values) {
  for (const TensorSpec& tensor : layout.tensors()) {
    read_tensor(file, prefix + tensor.name,
                values.subspan(tensor.range.begin, tensor.range.size()));
  }
}

void save_model(const std::string& folder, const ParameterLayout& layout,
                std::span<const float> parameters, const Tokenizer* tokenizer, std::int64_t steps) {
  make_folder(folder);
  const std::string prefix = folder + "/";
  if (tokenizer != nullptr && !tokenizer->model().empty()) {
    write_file(prefix + kTokenizerFile, tokenizer->model());
  }
  write_file(prefix + kConfigFile, config_json(layout.config(), tokenizer));
  write_safetensors(prefix + kWeightsFile, tensors_to_store(layout, parameters),
                    {{"format", "pt"},
                     {"lockstep_steps", std::to_string(steps)},
                     {"lockstep_weights", weights_hash(layout, parameters)}});
}

SavedModel read_model(FileSource& files) {
  const ConfigFile config =
      parse_config_json(files.path(kConfigFile), as_text(files.get(kConfigFile)));
  SavedModel model;
  model.config = config.model;
  model.start = config.start;
  model.tokenizer = read_tokenizer(files, config);
  const ParameterLayout layout(model.config);
  if (!files.find(kWeightsFile) && files.find(kWeightsIndexFile)) {
    model.parameters = FloatBuffer(layout.size());
    read_sharded(layout, files, model.parameters.span());
  } else {
    const SafetensorsView file(files.path(kWeightsFile), files.get(kWeightsFile));
    if (layout.size() > files.get(kWeightsFile).size() / 2) {  // before so much memory is asked for
      throw_bad_file(file.path(), fmt::format("too small for {} parameters", layout.size()));
    }
    model.parameters = FloatBuffer(layout.size());
    read_tensors(layout, file, "", model.parameters.span());
  }
  return model;
}

SavedModel load_model(const std::string& folder) {
  MappedFolder files(folder);
  if (files.find(kManifestFile)) {
    require_intact(files, {kConfigFile, kTokenizerFile, kWeightsFile});
  }
  return read_model(files);
}

}  // namespace lockstep
