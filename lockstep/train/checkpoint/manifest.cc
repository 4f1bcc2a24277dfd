#include "lockstep/train/checkpoint/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/files/file_source.h"
#include "lockstep/files/json.h"

namespace lockstep {
namespace {

constexpr std::string_view kFormat = "lockstep checkpoint";
constexpr std::uint64_t kVersion = 1;
constexpr std::string_view kHashScheme = "blake3:";
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 62;

std::string hash_of(std::string_view text) {
  return to_hex(blake3(std::as_bytes(std::span(text))));
}

std::string read_hash(JsonReader& reader, const char* key) {
  std::string hash = reader.text(key);
  if (!parse_hash(hash)) reader.fail(fmt::format("'{}' is not a hash", key));
  return hash;
}

ManifestFile read_file(const Json& json, std::optional<std::string>& problem) {
  JsonReader reader(json);
  ManifestFile file;
  file.name = reader.text("name");
  file.bytes = reader.whole("bytes", kMostBytes);
  file.hash = read_hash(reader, "blake3");
  if (!is_plain_name(file.name)) reader.fail(fmt::format("'{}' names no file", file.name));
  if (json.is_object() && json.contains("tensors")) {
    for (const Json& entry : reader.list("tensors")) {
      JsonReader tensor(entry);
      file.tensors.push_back({tensor.text("name"), read_hash(tensor, "blake3")});
      if (tensor.problem()) reader.fail("a tensor: " + *tensor.problem());
    }
  }
  if (!problem) problem = reader.problem();
  return file;
}

Json json_of(const Manifest& manifest) {
  Json files = Json::array();
  for (const ManifestFile& file : manifest.files) {
    Json entry = {{"name", file.name}, {"bytes", file.bytes}, {"blake3", file.hash}};
    for (const ManifestTensor& tensor : file.tensors) {
      entry["tensors"].push_back({{"name", tensor.name}, {"blake3", tensor.hash}});
    }
    files.push_back(std::move(entry));
  }
  return {{"format", kFormat},
          {"version", kVersion},
          {"step", manifest.step},
          {"weights", manifest.weights},
          {"files", std::move(files)}};
}

}  // namespace

const ManifestFile* Manifest::find(std::string_view name) const {
  const auto found = std::ranges::find(files, name, &ManifestFile::name);
  return found == files.end() ? nullptr : &*found;
}

std::string to_json(const Manifest& manifest) {
  Json json = json_of(manifest);
  json["blake3"] = hash_of(to_text(json));
  return to_text(json, 1) + "\n";
}

std::variant<Manifest, FormatProblem> parse_manifest(std::string_view text) {
  const Json json = parse_json(text);
  JsonReader reader(json);
  if (reader.problem()) return FormatProblem{*reader.problem()};
  if (reader.text("format") != kFormat) return FormatProblem{"not a checkpoint's manifest"};
  if (reader.whole("version") != kVersion) {
    return FormatProblem{fmt::format("another version, and this program reads {}", kVersion)};
  }
  const std::string hash = read_hash(reader, "blake3");
  Manifest manifest;
  manifest.step = static_cast<std::int64_t>(reader.whole("step", INT64_MAX));
  manifest.weights = reader.text("weights");
  std::set<std::string> names;
  std::optional<std::string> problem;
  for (const Json& entry : reader.list("files")) {
    manifest.files.push_back(read_file(entry, problem));
    if (!names.insert(manifest.files.back().name).second) reader.fail("a file is there twice");
  }
  if (reader.problem()) return FormatProblem{*reader.problem()};
  if (problem) return FormatProblem{"a file: " + *problem};
  if (hash_of(to_text(json_of(manifest))) != hash) {
    return FormatProblem{"it was changed after it was written: its own hash does not hold"};
  }
  return manifest;
}

std::string combine_tensor_hashes(std::span<const ManifestTensor> tensors) {
  Blake3 all;
  for (const ManifestTensor& tensor : tensors) {
    all.update(parse_hash(tensor.hash).value_or(Blake3Hash{}));
  }
  return std::string(kHashScheme) + to_hex(all.finish());
}

}  // namespace lockstep
