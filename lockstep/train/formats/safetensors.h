#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/file_source.h"

namespace lockstep {

// The safetensors format: a length, a JSON header, and the bytes of the tensors without gaps.

enum class TensorType { kF32, kF16, kBf16, kOther };

struct StoredTensor {
  std::string name = {};
  TensorType type = TensorType::kF32;
  std::string type_name = {};  // as the format calls it
  std::vector<std::int64_t> shape = {};
  std::size_t begin = 0;  // in the file
  std::size_t end = 0;

  std::size_t elements() const;
};

// Bytes per element of a type of the format; 0: no such type.
std::size_t safetensors_type_bytes(std::string_view type);

struct SafetensorsProblem {
  std::size_t position = 0;
  std::string what;
};
using SafetensorsHeader = std::vector<StoredTensor>;  // in the order of the file

// How many bytes of a file parse_safetensors() needs: its length and header, or fewer where `begin`
// or the length is wrong. `begin` is at least the first eight bytes, or all of a shorter file.
std::uint64_t safetensors_head_bytes(std::span<const std::byte> begin, std::uint64_t file_bytes);
// Parses the first bytes of a file of `file_bytes` bytes, which may be anything. In the result
// every tensor lies inside the file, its size fits its shape, and the tensors cover the data
// without gap or overlap. Pure.
std::variant<SafetensorsHeader, SafetensorsProblem> parse_safetensors(
    std::span<const std::byte> head, std::uint64_t file_bytes);

// A file of tensors, which is read where it is. The source must outlive it.
class SafetensorsFile {
 public:
  // Reads the header. Throws Error{kIo} with file and position.
  SafetensorsFile(FileSource& files, std::string name);

  std::string path() const { return files_.path(name_); }
  const SafetensorsHeader& tensors() const { return tensors_; }
  const StoredTensor* find(std::string_view name) const;  // nullptr: none
  // The text under this key of the metadata; empty: none.
  std::string metadata(const char* key) const;

  // Where the values of one of the tensors go.
  struct Target {
    const StoredTensor* tensor = nullptr;
    std::span<float> values = {};
  };
  // Where the values of the tensor of that name go. Throws Error{kIo} when there is none, when it
  // has another number of elements, or when its type is kOther.
  Target target(const std::string& name, std::span<float> values) const;
  // Reads these tensors, each at most once, converted to f32, on several threads. Reads the whole
  // file; returns its BLAKE3. Throws Error{kIo} with file and position.
  Blake3Hash read(std::vector<Target> targets) const;

 private:
  FileSource& files_;
  const std::string name_;
  const std::uint64_t bytes_;
  std::vector<std::byte> head_;
  SafetensorsHeader tensors_;
};

// One tensor to be written.
struct TensorToStore {
  TensorToStore(std::string named, std::vector<std::int64_t> sizes, std::span<const float> values)
      : TensorToStore(std::move(named), std::move(sizes), std::as_bytes(values), "F32") {}
  TensorToStore(std::string named, std::vector<std::int64_t> sizes,
                std::span<const std::byte> contents, std::string type_name)
      : name(std::move(named)),
        shape(std::move(sizes)),
        bytes(contents),
        type(std::move(type_name)) {}

  std::string name;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
  std::string type;  // as the format calls it
};
using SafetensorsMetadata = std::map<std::string, std::string>;

// The bytes before the tensors in a file that has them in this order.
std::string safetensors_head(std::span<const TensorToStore> tensors,
                             const SafetensorsMetadata& metadata);

// Writes the tensors in this order. The file appears complete or not at all.
void write_safetensors(const std::string& path, std::span<const TensorToStore> tensors,
                       const SafetensorsMetadata& metadata, const WriteGuard& guard = {},
                       Storage& storage = disk());

}  // namespace lockstep
