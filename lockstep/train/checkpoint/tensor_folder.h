#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/files/file_source.h"
#include "lockstep/files/storage.h"
#include "lockstep/train/checkpoint/manifest.h"
#include "lockstep/train/formats/safetensors.h"

namespace lockstep {

// A checkpoint of anybody's model: a folder with tensors, metadata that mean something to their
// writer alone, and a manifest of both, as docs/checkpoint_format.md specifies. It appears complete
// or not at all.

constexpr const char* kMetadataFile = "metadata.bin";

// Writes the folder; fails when there is something else at `path`. Throws Error{kInvalidArgument}
// for a tensor whose type, shape and bytes do not fit together or whose name is there twice.
void save_tensors(const std::string& path, std::int64_t step, std::vector<TensorToStore> tensors,
                  std::span<const std::byte> metadata, Storage& storage = disk());

// A folder that is read. Throws Error{kIo} that names what is damaged or missing. One thread.
class TensorFolder {
 public:
  // Reads manifest, metadata and the list of tensors.
  explicit TensorFolder(const std::string& path, Storage& storage = disk());

  std::int64_t step() const { return manifest_.step; }
  const std::string& metadata() const { return metadata_; }
  const SafetensorsHeader& tensors() const { return file_->tensors(); }
  // Reads all tensors into memory of their size, in their order; null: it is only checked.
  void read(std::span<std::byte* const> places) const;

 private:
  mutable StoredFiles files_;  // opens what is read
  Manifest manifest_;
  std::string metadata_;
  std::unique_ptr<SafetensorsFile> file_;
};

}  // namespace lockstep
