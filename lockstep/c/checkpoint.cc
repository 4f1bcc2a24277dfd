#include <fmt/format.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/c.h"
#include "lockstep/c/guard.h"
#include "lockstep/c/handles.h"
#include "lockstep/train/checkpoint/tensor_folder.h"
#include "lockstep/train/formats/safetensors.h"

namespace lockstep::c {
namespace {

// Elements of an array of the caller's version of the structure.
TensorToStore tensor_to_store(const lockstep_tensor* tensors, std::size_t index) {
  const auto* at = reinterpret_cast<const std::byte*>(tensors) + index * tensors->size;
  const auto tensor =
      known_part(reinterpret_cast<const lockstep_tensor*>(at), "lockstep_checkpoint_save: tensor");
  require(tensor.name, "lockstep_checkpoint_save: the name of a tensor");
  require(tensor.type, "lockstep_checkpoint_save: the type of a tensor");
  if (tensor.dimensions > 0) {
    require(tensor.shape, "lockstep_checkpoint_save: the shape of a tensor");
  }
  if (tensor.bytes > 0) require(tensor.data, "lockstep_checkpoint_save: the data of a tensor");
  return {tensor.name,
          {tensor.shape, tensor.shape + tensor.dimensions},
          std::span(static_cast<const std::byte*>(tensor.data), tensor.bytes),
          tensor.type};
}

}  // namespace
}  // namespace lockstep::c

using lockstep::c::guarded;
using lockstep::c::refuse;
using lockstep::c::require;

int lockstep_checkpoint_save(const char* path, int64_t step, const lockstep_tensor* tensors,
                             size_t count, const void* metadata, size_t metadata_bytes) {
  return guarded([&] {
    require(path, "lockstep_checkpoint_save: path");
    if (count > 0) require(tensors, "lockstep_checkpoint_save: tensors");
    if (metadata_bytes > 0) require(metadata, "lockstep_checkpoint_save: metadata");
    if (step < 0) refuse("lockstep_checkpoint_save: the step is negative");
    std::vector<lockstep::TensorToStore> stored;
    for (std::size_t i = 0; i < count; ++i) {
      stored.push_back(lockstep::c::tensor_to_store(tensors, i));
    }
    lockstep::save_tensors(path, step, std::move(stored),
                           std::span(static_cast<const std::byte*>(metadata), metadata_bytes));
    return LOCKSTEP_OK;
  });
}

int lockstep_checkpoint_open(const char* path, lockstep_checkpoint** checkpoint) {
  return guarded([&] {
    require(path, "lockstep_checkpoint_open: path");
    require(checkpoint, "lockstep_checkpoint_open: checkpoint");
    *checkpoint = nullptr;
    *checkpoint = new lockstep_checkpoint{lockstep::TensorFolder(path)};
    return LOCKSTEP_OK;
  });
}

void lockstep_checkpoint_destroy(lockstep_checkpoint* checkpoint) { delete checkpoint; }

int64_t lockstep_checkpoint_step(const lockstep_checkpoint* checkpoint) {
  return checkpoint->folder.step();
}

int lockstep_checkpoint_metadata(const lockstep_checkpoint* checkpoint, const void** bytes,
                                 size_t* count) {
  return guarded([&] {
    require(checkpoint, "lockstep_checkpoint_metadata: checkpoint");
    require(bytes, "lockstep_checkpoint_metadata: bytes");
    require(count, "lockstep_checkpoint_metadata: count");
    *bytes = checkpoint->folder.metadata().data();
    *count = checkpoint->folder.metadata().size();
    return LOCKSTEP_OK;
  });
}

size_t lockstep_checkpoint_count(const lockstep_checkpoint* checkpoint) {
  return checkpoint->folder.tensors().size();
}

int lockstep_checkpoint_tensor(const lockstep_checkpoint* checkpoint, size_t index,
                               lockstep_tensor* tensor) {
  return guarded([&] {
    require(checkpoint, "lockstep_checkpoint_tensor: checkpoint");
    const lockstep::SafetensorsHeader& tensors = checkpoint->folder.tensors();
    if (index >= tensors.size()) {
      refuse(fmt::format("lockstep_checkpoint_tensor: there are {} tensors, not {}", tensors.size(),
                         index + 1));
    }
    const lockstep::StoredTensor& stored = tensors[index];
    lockstep::c::write_known_part(
        tensor,
        {0, stored.name.c_str(), stored.type_name.c_str(), stored.shape.data(), stored.shape.size(),
         nullptr, stored.end - stored.begin},
        "lockstep_checkpoint_tensor: tensor");
    return LOCKSTEP_OK;
  });
}

int lockstep_checkpoint_read(const lockstep_checkpoint* checkpoint, void* const* data) {
  return guarded([&] {
    require(checkpoint, "lockstep_checkpoint_read: checkpoint");
    std::vector<std::byte*> places(checkpoint->folder.tensors().size());
    if (!places.empty()) require(data, "lockstep_checkpoint_read: data");
    for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<std::byte*>(data[i]);
    checkpoint->folder.read(places);
    return LOCKSTEP_OK;
  });
}
