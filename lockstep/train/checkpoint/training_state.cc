#include "lockstep/train/checkpoint/training_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <future>
#include <iterator>
#include <optional>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/data/shard_builder.h"
#include "lockstep/model/layout.h"
#include "lockstep/train/checkpoint/manifest.h"
#include "lockstep/train/formats/model_files.h"
#include "lockstep/train/formats/safetensors.h"
#include "lockstep/wire/bytes.h"

namespace lockstep {
namespace {

// A piece is hashed twice and copied while it is in the cache.
constexpr std::size_t kPieceBytes = 1 << 20;

constexpr const char* kFirstMoment = "exp_avg.";
constexpr const char* kSecondMoment = "exp_avg_sq.";
constexpr const char* kRank = "rank.";

constexpr std::string_view kMagic = "LOCKSTAT";
constexpr std::uint32_t kBytesVersion = 1;
constexpr std::uint32_t kMostFiles = 64;
constexpr std::uint32_t kLongestName = 255;

template <typename Body>
void for_pieces(std::span<const std::byte> bytes, Body&& body) {
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(kPieceBytes, bytes.size()))) {
    body(bytes.first(std::min(kPieceBytes, bytes.size())));
  }
}

// One file: `head`, then the values of the tensors, which belong to the state.
struct StateFile {
  std::string name;
  std::string head;
  std::vector<TensorToStore> tensors = {};

  std::uint64_t bytes() const {
    std::uint64_t count = head.size();
    for (const TensorToStore& tensor : tensors) count += tensor.values.size_bytes();
    return count;
  }
};

using ByteSink = std::function<void(std::span<const std::byte>)>;

StateFile tensors_file(const char* name, std::vector<TensorToStore> tensors) {
  std::string head = safetensors_head(tensors, {{"format", "pt"}});
  return {name, std::move(head), std::move(tensors)};
}

Manifest read_manifest(FileSource& files) {
  auto parsed = parse_manifest(as_text(files.get(kManifestFile)));
  if (const auto* problem = std::get_if<FormatProblem>(&parsed)) {
    throw_bad_file(files.path(kManifestFile), problem->what);
  }
  return std::get<Manifest>(std::move(parsed));
}

// The tensors of a file whose bytes are not those that were written.
std::vector<Damage> find_damaged_tensors(const ManifestFile& file, const std::string& path,
                                         std::span<const std::byte> bytes) {
  std::vector<Damage> damage;
  const auto parsed = parse_safetensors(bytes);
  if (const auto* problem = std::get_if<SafetensorsProblem>(&parsed)) {
    return {{path, fmt::format("byte {}: {}", problem->position, problem->what)}};
  }
  const auto& stored = std::get<SafetensorsHeader>(parsed);
  for (const ManifestTensor& tensor : file.tensors) {
    const auto found = std::ranges::find(stored, tensor.name, &StoredTensor::name);
    if (found == stored.end()) {
      damage.push_back({path, fmt::format("tensor '{}' is missing", tensor.name)});
    } else if (to_hex(blake3(bytes.subspan(found->begin, found->end - found->begin))) !=
               tensor.hash) {
      damage.push_back({path, fmt::format("tensor '{}' is damaged", tensor.name)});
    }
  }
  return damage;
}

std::vector<Damage> check_file(const ManifestFile& file, const std::string& path,
                               std::optional<std::span<const std::byte>> bytes, bool tensors) {
  if (!bytes) return {{path, "is missing"}};
  if (bytes->size() != file.bytes) {
    return {{path, fmt::format("has {} bytes instead of {}", bytes->size(), file.bytes)}};
  }
  const bool same = to_hex(blake3(*bytes)) == file.hash;
  if (same && !tensors) return {};
  std::vector<Damage> damage;
  if (!file.tensors.empty()) damage = find_damaged_tensors(file, path, *bytes);
  if (!same && damage.empty()) damage.push_back({path, "is damaged: its hash does not hold"});
  return damage;
}

void require_none(std::span<const Damage> damage) {
  if (damage.empty()) return;
  std::string text;
  for (const Damage& each : damage.first(std::min<std::size_t>(damage.size(), 3))) {
    text += fmt::format("{}{}: {}", text.empty() ? "" : "; ", each.path, each.what);
  }
  if (damage.size() > 3) text += fmt::format("; and {} more", damage.size() - 3);
  throw Error(ErrorCode::kIo, text);
}

FloatBuffer read_moment(const ParameterLayout& layout, const SafetensorsView& file,
                        const char* prefix) {
  FloatBuffer values(layout.size());
  read_tensors(layout, file, prefix, values.span());
  return values;
}

FloatBuffer read_residuals(FileSource& files, std::size_t size) {
  const SafetensorsView file(files.path(kResidualFile), files.get(kResidualFile));
  FloatBuffer residuals(file.tensors().size() * size);
  for (std::size_t rank = 0; rank < file.tensors().size(); ++rank) {
    const std::string name = fmt::format("{}{}", kRank, rank);
    const StoredTensor* tensor = file.find(name);
    if (tensor == nullptr) throw_bad_file(file.path(), fmt::format("'{}' is missing", name));
    file.read(*tensor, residuals.span().subspan(rank * size, size));
  }
  return residuals;
}

// Called before memory for the model is allocated: the file must be large enough to fill it.
void require_room(FileSource& files, const ModelConfig& model) {
  const std::size_t bytes = files.get(kOptimizerFile).size();
  try {
    if (ParameterLayout(model).size() <= bytes / (2 * sizeof(float))) return;
  } catch (const Error& error) {
    throw_bad_file(files.path(kStateFile), std::string(error.message()));
  }
  throw_bad_file(files.path(kOptimizerFile), "too small for the model of trainer_state.json");
}

void require_sizes(const TrainingState& state, const ParameterLayout& layout) {
  for (const FloatBuffer* buffer : {&state.parameters, &state.first_moment, &state.second_moment}) {
    LOCKSTEP_CHECK(buffer->size() == layout.size());
  }
}

// All files but the manifest, which needs their hashes.
std::vector<StateFile> state_files(const TrainingState& state) {
  const ParameterLayout layout(state.run.settings.model);
  require_sizes(state, layout);
  std::vector<StateFile> files;
  files.push_back({kConfigFile, config_json(layout.config(), state.tokenizer.get())});
  if (state.tokenizer) {
    for (TokenizerFile& file : state.tokenizer->files()) {
      files.push_back({std::move(file.name), std::move(file.bytes)});
    }
  }
  files.push_back({kStateFile, to_json(state.run)});
  files.push_back(tensors_file(kWeightsFile, tensors_to_store(layout, state.parameters.span())));
  auto moments = tensors_to_store(layout, state.first_moment.span(), kFirstMoment);
  std::ranges::move(tensors_to_store(layout, state.second_moment.span(), kSecondMoment),
                    std::back_inserter(moments));
  files.push_back(tensors_file(kOptimizerFile, std::move(moments)));
  std::vector<TensorToStore> residuals;
  for (std::size_t at = 0; at < state.residuals.size(); at += layout.size()) {
    residuals.push_back({fmt::format("{}{}", kRank, residuals.size()),
                         {static_cast<std::int64_t>(layout.size())},
                         state.residuals.span().subspan(at, layout.size())});
  }
  if (!residuals.empty()) files.push_back(tensors_file(kResidualFile, std::move(residuals)));
  return files;
}

// Gives the file to `sink` in pieces; returns its entry of the manifest.
ManifestFile emit_file(const StateFile& file, const ByteSink& sink) {
  ManifestFile entry = {.name = file.name, .bytes = file.bytes()};
  Blake3 all;
  for_pieces(std::as_bytes(std::span(file.head)), [&](std::span<const std::byte> piece) {
    all.update(piece);
    sink(piece);
  });
  for (const TensorToStore& tensor : file.tensors) {
    Blake3 own;
    for_pieces(std::as_bytes(tensor.values), [&](std::span<const std::byte> piece) {
      own.update(piece);
      all.update(piece);
      sink(piece);
    });
    entry.tensors.push_back({tensor.name, to_hex(own.finish())});
  }
  entry.hash = to_hex(all.finish());
  return entry;
}

Manifest make_manifest(const RunState& run, std::vector<ManifestFile> files) {
  Manifest manifest = {.step = run.step, .files = std::move(files)};
  if (const ManifestFile* weights = manifest.find(kWeightsFile)) {
    manifest.weights = combine_tensor_hashes(weights->tensors);
  }
  return manifest;
}

}  // namespace

std::vector<Damage> find_damage(FileSource& files, bool tensors) {
  const std::string path = files.path(kManifestFile);
  const auto text = files.find(kManifestFile);
  if (!text) return {{path, "is missing"}};
  const auto parsed = parse_manifest(as_text(*text));
  if (const auto* problem = std::get_if<FormatProblem>(&parsed)) return {{path, problem->what}};
  const auto& manifest = std::get<Manifest>(parsed);
  std::vector<Damage> damage;
  for (const char* name : {kConfigFile, kStateFile, kWeightsFile, kOptimizerFile}) {
    if (manifest.find(name) == nullptr) {
      damage.push_back({path, fmt::format("says nothing of {}", name)});
    }
  }
  const ManifestFile* weights = manifest.find(kWeightsFile);
  if (weights != nullptr && combine_tensor_hashes(weights->tensors) != manifest.weights) {
    damage.push_back({path, "the hash of the weights is not that of their tensors"});
  }
  std::vector<std::future<std::vector<Damage>>> checks;  // in parallel: two files are large
  for (const ManifestFile& file : manifest.files) {
    checks.push_back(std::async(std::launch::async, check_file, std::cref(file),
                                files.path(file.name), files.find(file.name), tensors));
  }
  for (auto& check : checks) std::ranges::move(check.get(), std::back_inserter(damage));
  return damage;
}

void require_intact(FileSource& files, std::initializer_list<const char*> names) {
  const Manifest manifest = read_manifest(files);
  for (const char* name : names) {
    if (const ManifestFile* file = manifest.find(name)) {
      require_none(check_file(*file, files.path(name), files.find(name), false));
    }
  }
}

TrainingState read_training_state(FileSource& files) {
  require_none(find_damage(files, false));
  const Manifest manifest = read_manifest(files);
  auto parsed = parse_run_state(as_text(files.get(kStateFile)));
  if (const auto* problem = std::get_if<FormatProblem>(&parsed)) {
    throw_bad_file(files.path(kStateFile), problem->what);
  }
  TrainingState state;
  state.run = std::get<RunState>(std::move(parsed));
  if (state.run.step != manifest.step) {
    throw_bad_file(files.path(kStateFile),
                   fmt::format("step {}, but the manifest says {}", state.run.step, manifest.step));
  }
  require_room(files, state.run.settings.model);
  const ParameterLayout layout(state.run.settings.model);
  const SafetensorsView moments(files.path(kOptimizerFile), files.get(kOptimizerFile));
  const auto read = [&](const char* prefix) {
    return std::async(std::launch::async, read_moment, std::cref(layout), std::cref(moments),
                      prefix);
  };
  auto first_moment = read(kFirstMoment);
  auto second_moment = read(kSecondMoment);
  SavedModel model = read_model(files);
  if (model.config != state.run.settings.model) {
    throw_bad_file(files.path(kStateFile), "another model than that of config.json");
  }
  state.tokenizer = std::move(model.tokenizer);
  state.parameters = std::move(model.parameters);
  state.first_moment = first_moment.get();
  state.second_moment = second_moment.get();
  if (manifest.find(kResidualFile) != nullptr) {
    state.residuals = read_residuals(files, layout.size());
  }
  return state;
}

std::uint64_t write_training_state(const TrainingState& state, AtomicFolder& folder) {
  std::vector<ManifestFile> entries;
  std::uint64_t bytes = 0;
  for (const StateFile& file : state_files(state)) {
    folder.begin_file(file.name);
    entries.push_back(
        emit_file(file, [&](std::span<const std::byte> piece) { folder.write(piece); }));
    folder.end_file();
    bytes += entries.back().bytes;
  }
  folder.begin_file(kManifestFile);
  folder.write(to_json(make_manifest(state.run, std::move(entries))));
  folder.end_file();
  return bytes;
}

std::vector<std::byte> to_bytes(const TrainingState& state) {
  const auto files = state_files(state);
  std::size_t size = 1 << 16;
  for (const StateFile& file : files) size += file.bytes() + file.head.size();
  ByteWriter writer;
  writer.reserve(size);
  writer.bytes(std::as_bytes(std::span(kMagic)));
  writer.u32(kBytesVersion);
  writer.count(files.size() + 1, kMostFiles);
  const auto add = [&](const StateFile& file) {
    writer.string(file.name, kLongestName);
    writer.u64(file.bytes());
    return emit_file(file, [&](std::span<const std::byte> piece) { writer.bytes(piece); });
  };
  std::vector<ManifestFile> entries;
  for (const StateFile& file : files) entries.push_back(add(file));
  add({kManifestFile, to_json(make_manifest(state.run, std::move(entries)))});
  return std::move(writer).take();
}

TrainingState from_bytes(std::span<const std::byte> bytes, const std::string& where) {
  ByteReader reader(bytes);
  if (as_text(reader.bytes(kMagic.size())) != kMagic) throw_bad_file(where, "not a training state");
  if (reader.u32() != kBytesVersion) throw_bad_file(where, "a training state of another version");
  FilesInMemory files(where);
  const std::uint32_t count = reader.count(1, kMostFiles);
  for (std::uint32_t i = 0; i < count; ++i) {
    std::string name(reader.string(kLongestName));
    const std::uint64_t size = reader.u64();
    if (!files.add(std::move(name), reader.bytes(size)))
      throw_bad_file(where, "a file comes twice");
  }
  if (!reader.finished()) throw_bad_file(where, "the bytes end early, or late");
  return read_training_state(files);
}

}  // namespace lockstep
