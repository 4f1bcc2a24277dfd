#include "lockstep/train/checkpoint/tensor_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/hash/blake3.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/hashed_read.h"
#include "lockstep/files/mapped_file.h"
#include "lockstep/train/checkpoint/state_file.h"
#include "lockstep/train/formats/model_files.h"

namespace lockstep {
namespace {

void check_tensor(const TensorToStore& tensor) {
  std::uint64_t bytes = safetensors_type_bytes(tensor.type);
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("tensor '{}' {}", tensor.name, why));
  };
  if (bytes == 0) refuse(fmt::format("has the unknown type {}", tensor.type));
  for (const std::int64_t size : tensor.shape) {
    if (size < 0) refuse("has a shape that cannot be");
    bytes *= static_cast<std::uint64_t>(size);
  }
  if (bytes != tensor.bytes.size()) {
    refuse(fmt::format("has {} bytes, but its shape takes {}", tensor.bytes.size(), bytes));
  }
}

// Of a folder that is read.
const ManifestFile& listed(FileSource& files, const Manifest& manifest, const char* name) {
  const ManifestFile* file = manifest.find(name);
  if (file == nullptr) {
    throw_bad_file(files.path(kManifestFile), fmt::format("says nothing of {}", name));
  }
  if (files.size(name) != file->bytes) {
    throw_bad_file(files.path(name),
                   fmt::format("has {} bytes instead of {}", files.size(name), file->bytes));
  }
  return *file;
}

void require_hash(FileSource& files, const ManifestFile& file, const Blake3Hash& hash) {
  if (to_hex(hash) == file.hash) return;
  throw_bad_file(files.path(file.name), "is damaged: its hash does not hold");
}

}  // namespace

void save_tensors(const std::string& path, std::int64_t step, std::vector<TensorToStore> tensors,
                  std::span<const std::byte> metadata, Storage& storage) {
  std::set<std::string> names;
  for (const TensorToStore& tensor : tensors) {
    check_tensor(tensor);
    if (!names.insert(tensor.name).second) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("tensor '{}' is there twice", tensor.name));
    }
  }
  AtomicFolder folder(path, {}, storage);
  Manifest manifest = {.step = step};
  for (const StateFile& file : {StateFile{kMetadataFile, std::string(as_text(metadata))},
                                tensors_file(kWeightsFile, std::move(tensors))}) {
    folder.begin_file(file.name);
    manifest.files.push_back(
        emit_file(file, [&](std::span<const std::byte> piece) { folder.write(piece); }));
    folder.end_file();
  }
  manifest.weights = combine_tensor_hashes(manifest.files.back().tensors);
  folder.begin_file(kManifestFile);
  folder.write(to_json(manifest));
  folder.end_file();
  folder.commit();
}

TensorFolder::TensorFolder(const std::string& path, Storage& storage)
    : files_(path, storage), manifest_(read_manifest(files_)) {
  for (const std::string& name : unlisted_files(files_, manifest_)) {
    throw_bad_file(files_.path(name), kUnlisted);
  }
  const ManifestFile& metadata = listed(files_, manifest_, kMetadataFile);
  metadata_ = files_.text(kMetadataFile);
  require_hash(files_, metadata, blake3(std::as_bytes(std::span(metadata_))));
  listed(files_, manifest_, kWeightsFile);
  file_ = std::make_unique<SafetensorsFile>(files_, kWeightsFile);
}

void TensorFolder::read(std::span<std::byte* const> places) const {
  LOCKSTEP_CHECK(places.size() == tensors().size());
  const Blake3Hash hash = read_and_hash(
      files_.size(kWeightsFile),
      [&](std::uint64_t position, std::span<std::byte> into) {
        files_.read(kWeightsFile, position, into);
      },
      [&](BlockReader& block) {
        const auto first = std::ranges::upper_bound(tensors(), block.at(), {}, &StoredTensor::end);
        for (auto tensor = first; tensor != tensors().end() && tensor->begin < block.end();
             ++tensor) {
          std::byte* place = places[static_cast<std::size_t>(tensor - tensors().begin())];
          const std::uint64_t begin = std::max<std::uint64_t>(tensor->begin, block.at());
          const std::uint64_t end = std::min<std::uint64_t>(tensor->end, block.end());
          if (place == nullptr || begin == end) continue;
          block.skip_to(begin);
          block.read_to({place + (begin - tensor->begin), end - begin});
        }
      });
  require_hash(files_, *manifest_.find(kWeightsFile), hash);
}

}  // namespace lockstep
