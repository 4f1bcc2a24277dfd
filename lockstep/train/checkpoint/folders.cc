#include "lockstep/train/checkpoint/folders.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <functional>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/data/shard_builder.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/train/checkpoint/manifest.h"

namespace lockstep {
namespace {

constexpr std::string_view kPrefix = "checkpoint-";
constexpr std::string_view kTemporarySuffix = ".tmp";

// The names in a folder; none when it does not exist.
std::vector<std::string> names_in(const std::string& folder) {
  std::error_code error;
  std::filesystem::directory_iterator entries(folder, error);
  if (error == std::errc::no_such_file_or_directory) return {};
  if (error) throw_io("reading the folder " + folder, error.value());
  std::vector<std::string> names;
  for (const auto& entry : entries) names.push_back(entry.path().filename());
  return names;
}

// A damaged checkpoint is kept: somebody may want to look at it.
void move_aside(const std::string& folder, const WriteGuard& guard) {
  if (!std::filesystem::exists(folder)) return;
  guard.require(folder);
  std::string to = folder + ".damaged";
  for (int i = 2; std::filesystem::exists(to); ++i) to = fmt::format("{}.damaged{}", folder, i);
  log(LogLevel::kWarning, "{} is there already: it is now {}", folder, to);
  rename_and_sync(folder, to);
}

// Whether a checkpoint that is there has the files of one that was just written. The manifest is a
// function of them.
bool same_and_intact(const std::string& there, const std::string& written) {
  try {
    MappedFolder old_files(there);
    MappedFolder new_files(written);
    return as_text(old_files.get(kManifestFile)) == as_text(new_files.get(kManifestFile)) &&
           find_damage(old_files, false).empty();
  } catch (const Error&) {  // it is not there, or cannot be read
    return false;
  }
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
  if (step < 0 || checkpoint_name(step) != name) return std::nullopt;  // such as checkpoint-007
  return step;
}

bool is_temporary_name(std::string_view name) {
  if (!name.ends_with(kTemporarySuffix)) return false;
  name.remove_suffix(kTemporarySuffix.size());
  return parse_checkpoint_name(name.substr(0, name.find('.'))).has_value();
}

std::uint64_t save_checkpoint(const std::string& out, const TrainingState& state,
                              const WriteGuard& guard) {
  const std::string path = checkpoint_path(out, state.run.step);
  AtomicFolder folder(path, guard);
  const std::uint64_t bytes = write_training_state(state, folder);
  if (same_and_intact(path, folder.temporary())) return bytes;
  move_aside(path, guard);
  folder.commit();
  return bytes;
}

std::vector<std::int64_t> list_checkpoints(const std::string& out) {
  std::vector<std::int64_t> steps;
  for (const std::string& name : names_in(out)) {
    if (const auto step = parse_checkpoint_name(name)) steps.push_back(*step);
  }
  std::ranges::sort(steps, std::greater());
  return steps;
}

TrainingState load_checkpoint(const std::string& folder) {
  MappedFolder files(folder);
  TrainingState state = read_training_state(files);
  const auto step = parse_checkpoint_name(std::filesystem::path(folder).filename().string());
  if (step && *step != state.run.step) {
    throw_bad_file(folder,
                   fmt::format("the checkpoint of step {} under a wrong name", state.run.step));
  }
  return state;
}

std::optional<NewestCheckpoint> load_newest_checkpoint(const std::string& out) {
  std::vector<std::int64_t> damaged;
  for (const std::int64_t step : list_checkpoints(out)) {
    try {
      TrainingState state = load_checkpoint(checkpoint_path(out, step));
      if (!damaged.empty()) {
        log(LogLevel::kWarning, "going back to {}, which is intact", checkpoint_name(step));
      }
      return NewestCheckpoint{std::move(state), std::move(damaged)};
    } catch (const Error& error) {
      log(LogLevel::kWarning, "{} cannot be used: {}", checkpoint_name(step), error.message());
      damaged.push_back(step);
    }
  }
  if (damaged.empty()) return std::nullopt;
  throw Error(ErrorCode::kIo,
              fmt::format("{}: none of its {} checkpoints is intact; nothing was changed", out,
                          damaged.size()));
}

SavedModel load_model(const std::string& folder) {
  MappedFolder files(folder);
  if (files.find(kManifestFile)) {
    require_intact(files,
                   {kConfigFile, kSentencePieceFile, kBpeFile, kBpeConfigFile, kWeightsFile});
  }
  return read_model(files);
}

std::vector<std::int64_t> checkpoints_to_delete(std::span<const std::int64_t> steps,
                                                std::int64_t saved, std::int64_t keep_last,
                                                std::span<const std::int64_t> spared) {
  if (keep_last <= 0) return {};
  std::vector<std::int64_t> earlier;
  for (const std::int64_t step : steps) {
    if (step < saved && std::ranges::find(spared, step) == spared.end()) {
      earlier.push_back(step);
    }
  }
  std::ranges::sort(earlier, std::greater());
  const auto kept = std::min(earlier.size(), static_cast<std::size_t>(keep_last - 1));
  return {earlier.begin() + static_cast<std::ptrdiff_t>(kept), earlier.end()};
}

void delete_old_checkpoints(const std::string& out, std::int64_t saved, std::int64_t keep_last,
                            std::span<const std::int64_t> spared, const WriteGuard& guard) {
  for (const std::int64_t step :
       checkpoints_to_delete(list_checkpoints(out), saved, keep_last, spared)) {
    const std::string path = checkpoint_path(out, step);
    const std::string going = guard.temporary(path);
    guard.require(path);
    remove_flat_folder(going);
    rename_and_sync(path, going);  // from now on it is not a checkpoint
    remove_flat_folder(going);
  }
}

void remove_temporaries(const std::string& out) {
  for (const std::string& name : names_in(out)) {
    if (is_temporary_name(name)) remove_flat_folder(out + "/" + name);
  }
}

}  // namespace lockstep
