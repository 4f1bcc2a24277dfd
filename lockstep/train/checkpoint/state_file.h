#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/files/file_source.h"
#include "lockstep/train/checkpoint/manifest.h"
#include "lockstep/train/formats/safetensors.h"

namespace lockstep {

// One file of a checkpoint: `head`, then the values of the tensors, which belong to the caller.
struct StateFile {
  std::string name;
  std::string head;
  std::vector<TensorToStore> tensors = {};

  std::uint64_t bytes() const;
};

// A file of tensors.
StateFile tensors_file(const char* name, std::vector<TensorToStore> tensors);

using ByteSink = std::function<void(std::span<const std::byte>)>;
// Gives the file to `sink` in pieces, while another thread hashes it; returns its entry of the
// manifest.
ManifestFile emit_file(const StateFile& file, const ByteSink& sink);

// The text of the manifest; nothing when there is none. Throws Error{kIo} when it is larger than
// any manifest: of a damaged file it could be more than there is memory.
std::optional<std::string> find_manifest_text(FileSource& files);
// Throws Error{kIo} when the manifest is missing or is none.
Manifest read_manifest(FileSource& files);

// Files that the manifest does not list: they do not belong to the checkpoint. Hidden ones, which
// some file systems make by themselves, are never read, and are left out.
std::vector<std::string> unlisted_files(const FileSource& files, const Manifest& manifest);
constexpr const char* kUnlisted =
    "does not belong to the checkpoint: the manifest does not list it";

}  // namespace lockstep
