#include "lockstep/train/checkpoint/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/files/atomic_file.h"

namespace lockstep {
namespace {

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

// Somebody may want to look at what was damaged, so it is kept.
void move_aside(const std::string& folder) {
  if (!std::filesystem::exists(folder)) return;
  std::string to = folder + ".damaged";
  for (int i = 2; std::filesystem::exists(to); ++i) to = fmt::format("{}.damaged{}", folder, i);
  log(LogLevel::kWarning, "{} is there already: it is now {}", folder, to);
  rename_and_sync(folder, to);
}

}  // namespace

std::uint64_t save_checkpoint(const std::string& out, const TrainingState& state) {
  const std::string path = checkpoint_path(out, state.run.step);
  AtomicFolder folder(path);
  std::vector<ManifestFile> entries;
  std::uint64_t bytes = 0;
  for (const CheckpointFile& file : checkpoint_files(state)) {
    folder.begin_file(file.name);
    entries.push_back(
        emit_file(file, [&](std::span<const std::byte> piece) { folder.write(piece); }));
    folder.end_file();
    bytes += entries.back().bytes;
  }
  folder.begin_file(kManifestFile);
  folder.write(to_json(make_manifest(state.run, std::move(entries))));
  folder.end_file();
  move_aside(path);
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

void delete_old_checkpoints(const std::string& out, std::int64_t saved, std::int64_t keep_last,
                            const std::vector<std::int64_t>& known_bad) {
  for (const std::int64_t step :
       checkpoints_to_delete(list_checkpoints(out), saved, keep_last, known_bad)) {
    const std::string path = checkpoint_path(out, step);
    remove_flat_folder(path + ".tmp");
    rename_and_sync(path, path + ".tmp");  // from here on it is no checkpoint
    remove_flat_folder(path + ".tmp");
  }
}

void remove_temporaries(const std::string& out) {
  for (const std::string& name : names_in(out)) {
    if (is_temporary_name(name)) remove_flat_folder(out + "/" + name);
  }
}

}  // namespace lockstep
