#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace lockstep {

// Names and manifest of a checkpoint, as docs/checkpoint_format.md specifies them, and which of
// several checkpoints to take or to delete. Pure.

constexpr const char* kManifestFile = "manifest.json";

// "checkpoint-500"
std::string checkpoint_name(std::int64_t step);
// OUT/checkpoint-500
std::string checkpoint_path(const std::string& out, std::int64_t step);
// The step; nothing when it is not the name of a complete checkpoint.
std::optional<std::int64_t> parse_checkpoint_name(std::string_view name);
// A checkpoint that is being written or deleted, and may be removed: "checkpoint-500.tmp".
bool is_temporary_name(std::string_view name);

// Whether a checkpoint is due after `step` steps: every `save_every`, and after the last;
// save_every 0 is never.
bool should_save_checkpoint(std::int64_t step, std::int64_t save_every, std::int64_t last_step);

// The checkpoints to delete once that of `saved` is complete. `known_bad` neither count nor are
// deleted; nor are later ones, which are another run's. keep_last 0 keeps all.
std::vector<std::int64_t> checkpoints_to_delete(std::span<const std::int64_t> steps,
                                                std::int64_t saved, std::int64_t keep_last,
                                                std::span<const std::int64_t> known_bad);

// A file's name without any folder, and no hidden one.
bool is_plain_name(std::string_view name);

// Hashes are BLAKE3, as 64 lower-case hexadecimal digits.
struct ManifestTensor {
  std::string name;
  std::string hash;
  bool operator==(const ManifestTensor&) const = default;
};
struct ManifestFile {
  std::string name = {};
  std::uint64_t bytes = 0;
  std::string hash = {};
  std::vector<ManifestTensor> tensors = {};  // in the file's order
  bool operator==(const ManifestFile&) const = default;
};
struct Manifest {
  std::int64_t step = 0;
  std::string weights = {};  // as weights_hash() gives it
  std::vector<ManifestFile> files = {};
  bool operator==(const Manifest&) const = default;

  const ManifestFile* find(std::string_view name) const;  // nullptr: none
};

// What is wrong with bytes that are not of the format.
struct FormatProblem {
  std::string what;
};

// Ends with a hash over itself, so that an edit is noticed.
std::string to_json(const Manifest& manifest);
std::variant<Manifest, FormatProblem> parse_manifest(std::string_view text);

// weights_hash() from the hashes of the tensors.
std::string combine_tensor_hashes(std::span<const ManifestTensor> tensors);

}  // namespace lockstep
