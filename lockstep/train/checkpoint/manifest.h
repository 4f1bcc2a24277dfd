#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace lockstep {

// manifest.json of a checkpoint: size and hash of every file and every tensor, as
// docs/checkpoint_format.md specifies it. Pure.

constexpr const char* kManifestFile = "manifest.json";

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
  std::string weights = {};  // as weights_hash() returns it
  std::vector<ManifestFile> files = {};
  bool operator==(const Manifest&) const = default;

  const ManifestFile* find(std::string_view name) const;  // nullptr: not listed
};

// What is wrong with text that is not of the format.
struct FormatProblem {
  std::string what;
};

// The text ends with a hash of itself, so that parse_manifest() notices an edit.
std::string to_json(const Manifest& manifest);
std::variant<Manifest, FormatProblem> parse_manifest(std::string_view text);

// weights_hash(), computed from the hashes of the tensors.
std::string combine_tensor_hashes(std::span<const ManifestTensor> tensors);

}  // namespace lockstep
