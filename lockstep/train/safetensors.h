#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lockstep/data/mapped_file.h"

namespace lockstep {

// The safetensors format: a length, a JSON header, and the tensors' bytes without gaps.

enum class TensorType { kF32, kF16, kBf16, kOther };

struct StoredTensor {
  std::string name = {};
  TensorType type = TensorType::kF32;
  std::vector<std::int64_t> shape = {};
  std::size_t begin = 0;  // in the file
  std::size_t end = 0;

  std::size_t elements() const;
};

struct SafetensorsProblem {
  std::size_t position = 0;
  std::string what;
};
using SafetensorsHeader = std::vector<StoredTensor>;  // by place in the file

// Pure; for bytes that nobody vouches for. Every tensor lies inside the file, its size fits its
// shape, and the tensors cover the data without gap or overlap.
std::variant<SafetensorsHeader, SafetensorsProblem> parse_safetensors(
    std::span<const std::byte> file);

class SafetensorsFile {
 public:
  // Throws Error{kIo} with file and position.
  explicit SafetensorsFile(const std::string& path);

  const SafetensorsHeader& tensors() const { return tensors_; }
  const StoredTensor* find(std::string_view name) const;  // nullptr: none
  // Converts to f32. Throws Error{kIo} when the type is another, or the number of elements.
  void read(const StoredTensor& tensor, std::span<float> out) const;

 private:
  MappedFile file_;
  SafetensorsHeader tensors_;
};

// One f32 tensor to be written.
struct TensorToStore {
  std::string name;
  std::vector<std::int64_t> shape;
  std::span<const float> values;
};
using SafetensorsMetadata = std::map<std::string, std::string>;

// In the order given; atomically.
void write_safetensors(const std::string& path, std::span<const TensorToStore> tensors,
                       const SafetensorsMetadata& metadata);

}  // namespace lockstep
