#include "lockstep/train/checkpoint/folders.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <functional>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/file_source.h"
#include "lockstep/files/mapped_file.h"
#include "lockstep/train/checkpoint/manifest.h"
#include "lockstep/train/checkpoint/state_file.h"

namespace lockstep {
namespace {

constexpr std::string_view kPrefix = "checkpoint-";
constexpr std::string_view kTemporarySuffix = ".tmp";

// The names in a folder; none when it does not exist.
std::vector<std::string> names_in(const std::string& path, Storage& storage) {
  std::vector<std::string> names;
  const auto folder = storage.find_folder(path);
  if (!folder) return names;
  for (Folder::Entry& entry : folder->entries()) names.push_back(std::move(entry.name));
  return names;
}

// A damaged checkpoint is kept: somebody may want to look at it.
void move_aside(Folder& out, const std::string& name, const WriteGuard& guard) {
  if (!out.has(name)) return;
  guard.require(out.path_of(name));
  std::string to = name + ".damaged";
  for (int i = 2; out.has(to); ++i) to = fmt::format("{}.damaged{}", name, i);
  out.rename(name, to);
  log(LogLevel::kWarning, "{} is there already: it is now {}", out.path_of(name), to);
  out.sync();
}

// Whether a checkpoint that is there has the files of one that was just written. The manifest is a
// function of them.
bool same_and_intact(const std::string& there, const std::string& written, Storage& storage) {
  try {
    StoredFiles old_files(there, storage);
    StoredFiles new_files(written, storage);
    return find_manifest_text(old_files) == find_manifest_text(new_files) &&
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
                              const WriteGuard& guard, Storage& storage) {
  const std::string path = checkpoint_path(out, state.run.step);
  for (bool again = false;; again = true) {
    if (again) guard.require(path);
    AtomicFolder folder(path, guard, storage);
    try {
      const std::uint64_t bytes = write_training_state(state, folder);
      // Whoever saved it may have ended, or failed, before its name was on disk.
      const auto is_on_disk = [&] {
        if (!same_and_intact(path, folder.temporary(), storage)) return false;
        storage.open_folder(out)->sync();
        return true;
      };
      if (is_on_disk()) return bytes;
      guard.require(path);  // may wait for another one that saves the same, or tidies up
      if (!folder.temporary_is_there()) {
        throw Error(ErrorCode::kIo, folder.temporary() + " was removed while it was written");
      }
      if (is_on_disk()) return bytes;
      move_aside(*storage.open_folder(out), checkpoint_name(state.run.step), guard);
      folder.commit();
      return bytes;
    } catch (const Error&) {
      // Who held the run until now may have taken it for a leftover.
      if (again || folder.temporary_is_there()) throw;
    }
  }
}

std::vector<std::int64_t> list_checkpoints(const std::string& out, Storage& storage) {
  std::vector<std::int64_t> steps;
  for (const std::string& name : names_in(out, storage)) {
    if (const auto step = parse_checkpoint_name(name)) steps.push_back(*step);
  }
  std::ranges::sort(steps, std::greater());
  return steps;
}

TrainingState load_checkpoint(const std::string& folder, Storage& storage) {
  StoredFiles files(folder, storage);
  TrainingState state = read_training_state(files);
  const auto step = parse_checkpoint_name(std::filesystem::path(folder).filename().string());
  if (step && *step != state.run.step) {
    throw_bad_file(folder,
                   fmt::format("the checkpoint of step {} under a wrong name", state.run.step));
  }
  return state;
}

std::optional<NewestCheckpoint> load_newest_checkpoint(const std::string& out, Storage& storage) {
  std::vector<std::int64_t> damaged;
  for (const std::int64_t step : list_checkpoints(out, storage)) {
    try {
      TrainingState state = load_checkpoint(checkpoint_path(out, step), storage);
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

SavedModel load_model(const std::string& folder, Storage& storage) {
  StoredFiles files(folder, storage);
  return files.find_size(kManifestFile) ? read_checkpoint_model(files) : read_model(files);
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
                            std::span<const std::int64_t> spared, const WriteGuard& guard,
                            Storage& storage) {
  const auto steps =
      checkpoints_to_delete(list_checkpoints(out, storage), saved, keep_last, spared);
  if (steps.empty()) return;
  const auto folder = storage.open_folder(out);
  for (const std::int64_t step : steps) {
    const std::string name = checkpoint_name(step);
    const std::string going = guard.temporary(name);
    guard.require(folder->path_of(name));
    remove_flat_folder(*folder, going);
    folder->rename(name, going);  // from now on it is not a checkpoint
    folder->sync();
    remove_flat_folder(*folder, going);
  }
}

void remove_temporaries(const std::string& out, const WriteGuard& guard, Storage& storage) {
  const auto folder = storage.find_folder(out);
  if (!folder) return;
  for (const Folder::Entry& entry : folder->entries()) {
    if (!is_temporary_name(entry.name)) continue;
    guard.require(folder->path_of(entry.name));
    try {
      remove_flat_folder(*folder, entry.name);
    } catch (const Error& error) {  // such as a folder in it, which is none of ours
      log(LogLevel::kWarning, "{} stays: {}", folder->path_of(entry.name), error.message());
    }
  }
}

}  // namespace lockstep
