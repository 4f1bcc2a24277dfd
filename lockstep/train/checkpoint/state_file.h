#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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

// Throws Error{kIo} when the manifest is missing or is none.
Manifest read_manifest(FileSource& files);

}  // namespace lockstep
