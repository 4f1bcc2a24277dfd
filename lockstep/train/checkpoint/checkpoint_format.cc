#include "lockstep/train/checkpoint/checkpoint_format.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/train/formats/json_reader.h"

namespace lockstep {
namespace {

constexpr std::string_view kPrefix = "checkpoint-";
constexpr std::string_view kTemporarySuffix = ".tmp";
constexpr std::string_view kFormat = "lockstep checkpoint";
constexpr std::uint64_t kVersion = 1;
constexpr std::string_view kHashScheme = "blake3:";
constexpr std::size_t kHashDigits = 64;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 62;

std::string hash_of(std::string_view text) {
  return to_hex(blake3(std::as_bytes(std::span(text))));
}

int digit(char character) {
  if (character >= '0' && character <= '9') return character - '0';
  if (character >= 'a' && character <= 'f') return character - 'a' + 10;
  return -1;
}

bool is_hash(std::string_view text) {
  return text.size() == kHashDigits &&
         std::ranges::all_of(text, [](char character) { return digit(character) >= 0; });
}

std::string read_hash(JsonReader& reader, const char* key) {
  std::string hash = reader.text(key);
  if (!is_hash(hash)) reader.fail(fmt::format("'{}' is not a hash", key));
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

std::string checkpoint_name(std::int64_t step) { return fmt::format("{}{}", kPrefix, step); }

std::string checkpoint_path(const std::string& out, std::int64_t step) {
  return out + "/" + checkpoint_name(step);
}

std::optional<std::int64_t> parse_checkpoint_name(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kPrefix.size());
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  if (step < 0 || checkpoint_name(step) != name) return std::nullopt;  // 007 is none of ours
  return step;
}

bool is_temporary_name(std::string_view name) {
  return name.ends_with(kTemporarySuffix) &&
         parse_checkpoint_name(name.substr(0, name.size() - kTemporarySuffix.size())).has_value();
}

bool should_save_checkpoint(std::int64_t step, std::int64_t save_every, std::int64_t last_step) {
  if (save_every == 0) return false;
  return (step > 0 && step % save_every == 0) || step >= last_step;
}

std::vector<std::int64_t> checkpoints_to_delete(std::span<const std::int64_t> steps,
                                                std::int64_t saved, std::int64_t keep_last,
                                                std::span<const std::int64_t> known_bad) {
  if (keep_last <= 0) return {};
  std::vector<std::int64_t> earlier;
  for (const std::int64_t step : steps) {
    if (step < saved && std::ranges::find(known_bad, step) == known_bad.end()) {
      earlier.push_back(step);
    }
  }
  std::ranges::sort(earlier, std::greater());
  const auto kept = std::min(earlier.size(), static_cast<std::size_t>(keep_last - 1));
  return {earlier.begin() + static_cast<std::ptrdiff_t>(kept), earlier.end()};
}

bool is_plain_name(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name[0] != '.' &&
         name.find_first_of(std::string_view("/\0", 2)) == std::string_view::npos;
}

const ManifestFile* Manifest::find(std::string_view name) const {
  const auto found = std::ranges::find(files, name, &ManifestFile::name);
  return found == files.end() ? nullptr : &*found;
}

std::string to_json(const Manifest& manifest) {
  Json json = json_of(manifest);
  json["blake3"] = hash_of(json.dump());
  return json.dump(1) + "\n";
}

std::variant<Manifest, FormatProblem> parse_manifest(std::string_view text) {
  const Json json = Json::parse(text, nullptr, false);
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
  if (hash_of(json_of(manifest).dump()) != hash) {
    return FormatProblem{"it was changed after it was written: its own hash does not hold"};
  }
  return manifest;
}

std::string combine_tensor_hashes(std::span<const ManifestTensor> tensors) {
  Blake3 all;
  for (const ManifestTensor& tensor : tensors) {
    Blake3Hash hash{};
    for (std::size_t i = 0; i < hash.size() && is_hash(tensor.hash); ++i) {
      hash[i] =
          static_cast<std::byte>(digit(tensor.hash[2 * i]) * 16 + digit(tensor.hash[2 * i + 1]));
    }
    all.update(hash);
  }
  return std::string(kHashScheme) + to_hex(all.finish());
}

}  // namespace lockstep
