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

#include "lockstep/files/atomic_file.h"

namespace lockstep {

// The safetensors format: a length, a JSON header, and the bytes of the tensors without gaps.

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
using SafetensorsHeader = std::vector<StoredTensor>;  // in the order of the file

// Parses bytes that may be anything. In the result every tensor lies inside the file, its size fits
// its shape, and the tensors cover the data without gap or overlap. Pure.
std::variant<SafetensorsHeader, SafetensorsProblem> parse_safetensors(
    std::span<const std::byte> file);

// The tensors in the bytes of a file. The bytes must outlive the view.
class SafetensorsView {
 public:
  // `path` is for messages. Throws Error{kIo} with file and position.
  SafetensorsView(std::string path, std::span<const std::byte> file);

  const std::string& path() const { return path_; }
  const SafetensorsHeader& tensors() const { return tensors_; }
  const StoredTensor* find(std::string_view name) const;  // nullptr: none
  // Converts to f32. Throws Error{kIo} when the type is kOther or the number of elements differs.
  void read(const StoredTensor& tensor, std::span<float> out) const;

 private:
  std::string path_;
  std::span<const std::byte> file_;
  SafetensorsHeader tensors_;
};

// One f32 tensor to be written.
struct TensorToStore {
  std::string name;
  std::vector<std::int64_t> shape;
  std::span<const float> values;
};
using SafetensorsMetadata = std::map<std::string, std::string>;

// The bytes before the tensors in a file that has them in this order.
std::string safetensors_head(std::span<const TensorToStore> tensors,
                             const SafetensorsMetadata& metadata);

// Writes the tensors in this order. The file appears complete or not at all.
void write_safetensors(const std::string& path, std::span<const TensorToStore> tensors,
                       const SafetensorsMetadata& metadata, const WriteGuard& guard = {});

}  // namespace lockstep
