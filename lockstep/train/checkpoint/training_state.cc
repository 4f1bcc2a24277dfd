#include "lockstep/train/checkpoint/training_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <optional>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/index.h"
#include "lockstep/files/hashed_read.h"
#include "lockstep/files/mapped_file.h"
#include "lockstep/model/layout.h"
#include "lockstep/train/checkpoint/manifest.h"
#include "lockstep/train/checkpoint/state_file.h"
#include "lockstep/train/formats/model_files.h"
#include "lockstep/train/formats/safetensors.h"

namespace lockstep {
namespace {

constexpr const char* kFirstMoment = "exp_avg.";
constexpr const char* kSecondMoment = "exp_avg_sq.";
constexpr const char* kRank = "rank.";

constexpr const char* kHashDoesNotHold = "is damaged: its hash does not hold";

Blake3Hash hash_of_file(FileSource& files, const std::string& name,
                        const std::function<void(BlockReader& block)>& body = {}) {
  return read_and_hash(
      files.size(name),
      [&](std::uint64_t position, std::span<std::byte> into) { files.read(name, position, into); },
      body);
}

// The hash of a tensor, from pieces that are found in blocks of its file. A piece belongs to the
// block in which it begins; the block has been read so far ahead that the piece is all there.
class TensorHash {
 public:
  static constexpr std::size_t kPiece = BlockReader::kMostAhead;

  explicit TensorHash(const StoredTensor& tensor)
      : begin_(tensor.begin), end_(tensor.end), hash_(end_ - begin_, kPiece) {}

  // Pieces that begin in [position, end); `bytes` are those of the file from `position` on.
  void update(std::uint64_t position, std::uint64_t end, std::span<const std::byte> bytes) {
    const std::uint64_t from = std::max(begin_, position);
    for (std::size_t piece = (from - begin_ + kPiece - 1) / kPiece; piece < hash_.pieces();
         ++piece) {
      const std::uint64_t at = begin_ + piece * kPiece;
      if (at >= end) return;
      hash_.update(piece, bytes.subspan(at - position, std::min<std::uint64_t>(kPiece, end_ - at)));
    }
  }
  std::string hex() const { return to_hex(hash_.finish()); }

 private:
  std::uint64_t begin_;
  std::uint64_t end_;
  Blake3Pieces hash_;
};

// What is wrong with a file of tensors. With `each` its tensors are hashed in the same pass,
// otherwise only if the hash of the file does not hold.
std::vector<Damage> check_tensors(FileSource& files, const ManifestFile& file, bool each) {
  const SafetensorsFile stored(files, file.name);
  std::vector<TensorHash> hashes;
  if (each) hashes = std::vector<TensorHash>(stored.tensors().begin(), stored.tensors().end());
  const Blake3Hash hash = hash_of_file(files, file.name, [&](BlockReader& block) {
    if (!each) return;
    const std::uint64_t position = block.at();
    const auto bytes = block.read_rest(TensorHash::kPiece);
    for (TensorHash& tensor : hashes) tensor.update(position, block.end(), bytes);
  });
  std::vector<Damage> damage;
  for (const ManifestTensor& tensor : file.tensors) {
    const StoredTensor* found = stored.find(tensor.name);
    if (found == nullptr) {
      damage.push_back({stored.path(), fmt::format("tensor '{}' is missing", tensor.name)});
    } else if (each && hashes[index_of(found - stored.tensors().data())].hex() != tensor.hash) {
      damage.push_back({stored.path(), fmt::format("tensor '{}' is damaged", tensor.name)});
    }
  }
  if (!damage.empty() || to_hex(hash) == file.hash) return damage;
  if (!each) return check_tensors(files, file, true);
  return {{stored.path(), kHashDoesNotHold}};
}

// Of a file whose hash does not hold.
std::vector<Damage> name_damage(FileSource& files, const ManifestFile& file) {
  std::vector<Damage> damage;
  if (!file.tensors.empty()) damage = check_tensors(files, file, true);
  if (damage.empty()) damage.push_back({files.path(file.name), kHashDoesNotHold});
  return damage;
}

std::optional<Damage> find_wrong_size(FileSource& files, const ManifestFile& file) {
  const auto size = files.find_size(file.name);
  if (!size) return Damage{files.path(file.name), "is missing"};
  if (*size == file.bytes) return std::nullopt;
  return Damage{files.path(file.name),
                fmt::format("has {} bytes instead of {}", *size, file.bytes)};
}

// With `tensors` the file's header must fit the manifest, too, and tensors of weights are hashed
// though the hash of their file holds: the hash of the weights is made of theirs.
std::vector<Damage> check_file(FileSource& files, const ManifestFile& file, bool tensors) {
  try {
    if (const auto wrong = find_wrong_size(files, file)) return {*wrong};
    if (tensors && !file.tensors.empty())
      return check_tensors(files, file, file.name == kWeightsFile);
    if (to_hex(hash_of_file(files, file.name)) == file.hash) return {};
    return name_damage(files, file);
  } catch (const Error& error) {
    return {{files.path(file.name), fmt::format("cannot be read: {}", error.message())}};
  }
}

// What is wrong with a checkpoint whatever its files hold.
std::vector<Damage> check_list(FileSource& files, const Manifest& manifest) {
  std::vector<Damage> damage;
  const std::string path = files.path(kManifestFile);
  for (const char* name : {kConfigFile, kStateFile, kWeightsFile, kOptimizerFile}) {
    if (manifest.find(name) == nullptr) {
      damage.push_back({path, fmt::format("says nothing of {}", name)});
    }
  }
  const ManifestFile* weights = manifest.find(kWeightsFile);
  if (weights != nullptr && combine_tensor_hashes(weights->tensors) != manifest.weights) {
    damage.push_back({path, "the hash of the weights is not that of their tensors"});
  }
  for (const std::string& name : unlisted_files(files, manifest)) {
    damage.push_back({files.path(name), kUnlisted});
  }
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

// The manifest of a checkpoint that has what the manifest lists, and nothing else. Hashes the files
// without tensors; those with tensors are hashed when they are read.
Manifest require_listed(FileSource& files) {
  const Manifest manifest = read_manifest(files);
  require_none(check_list(files, manifest));
  for (const ManifestFile& file : manifest.files) {
    if (const auto wrong = find_wrong_size(files, file)) require_none({&*wrong, 1});
    if (file.tensors.empty()) require_none(check_file(files, file, false));
  }
  return manifest;
}

void require_hash(FileSource& files, const Manifest& manifest, const std::string& name,
                  const Blake3Hash& hash) {
  const ManifestFile* file = manifest.find(name);
  LOCKSTEP_CHECK(file != nullptr);  // the source has only files that are listed
  if (to_hex(hash) != file->hash) require_none(name_damage(files, *file));
}

SavedModel read_listed_model(FileSource& files, const Manifest& manifest) {
  return read_model(files, [&](const std::string& name, const Blake3Hash& hash) {
    require_hash(files, manifest, name, hash);
  });
}

void read_moments(FileSource& files, const Manifest& manifest, const ParameterLayout& layout,
                  TrainingState& state) {
  const SafetensorsFile file(files, kOptimizerFile);
  state.first_moment = FloatBuffer::untouched(layout.size());
  state.second_moment = FloatBuffer::untouched(layout.size());
  auto targets = targets_in(layout, file, kFirstMoment, state.first_moment.span());
  std::ranges::move(targets_in(layout, file, kSecondMoment, state.second_moment.span()),
                    std::back_inserter(targets));
  require_hash(files, manifest, kOptimizerFile, file.read(std::move(targets)));
}

FloatBuffer read_residuals(FileSource& files, const Manifest& manifest, std::size_t size) {
  const SafetensorsFile file(files, kResidualFile);
  const std::size_t ranks = file.tensors().size();
  if (size > files.size(kResidualFile) / sizeof(float) / std::max<std::size_t>(1, ranks)) {
    throw_bad_file(file.path(), "too small for its ranks");
  }
  FloatBuffer residuals(ranks * size);
  std::vector<SafetensorsFile::Target> targets;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    targets.push_back(
        file.target(fmt::format("{}{}", kRank, rank), residuals.span().subspan(rank * size, size)));
  }
  require_hash(files, manifest, kResidualFile, file.read(std::move(targets)));
  return residuals;
}

// Called before memory for the model is allocated: the file must be large enough to fill it.
void require_room(FileSource& files, const ModelConfig& model) {
  const std::uint64_t bytes = files.size(kOptimizerFile);
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
                         std::vector{static_cast<std::int64_t>(layout.size())},
                         state.residuals.span().subspan(at, layout.size())});
  }
  if (!residuals.empty()) files.push_back(tensors_file(kResidualFile, std::move(residuals)));
  return files;
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
  Manifest manifest;
  std::vector<Damage> damage;
  try {
    const auto text = find_manifest_text(files);
    if (!text) return {{path, "is missing"}};
    auto parsed = parse_manifest(*text);
    if (const auto* problem = std::get_if<FormatProblem>(&parsed)) return {{path, problem->what}};
    manifest = std::get<Manifest>(std::move(parsed));
    damage = check_list(files, manifest);
  } catch (const Error& error) {
    return {{path, fmt::format("cannot be read: {}", error.message())}};
  }
  for (const ManifestFile& file : manifest.files) {
    std::ranges::move(check_file(files, file, tensors), std::back_inserter(damage));
  }
  return damage;
}

SavedModel read_checkpoint_model(FileSource& files) {
  return read_listed_model(files, require_listed(files));
}

TrainingState read_training_state(FileSource& files) {
  const Manifest manifest = require_listed(files);
  auto parsed = parse_run_state(files.text(kStateFile));
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
  SavedModel model = read_listed_model(files, manifest);
  if (model.config != state.run.settings.model) {
    throw_bad_file(files.path(kStateFile), "another model than that of config.json");
  }
  state.tokenizer = std::move(model.tokenizer);
  state.parameters = std::move(model.parameters);
  read_moments(files, manifest, layout, state);
  if (manifest.find(kResidualFile) != nullptr) {
    state.residuals = read_residuals(files, manifest, layout.size());
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

}  // namespace lockstep
