#include "lockstep/train/formats/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "lockstep/files/atomic_file.h"
#include "lockstep/files/json.h"
#include "lockstep/files/mapped_file.h"
#include "lockstep/wire/bytes.h"

namespace lockstep {
namespace {

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kMostHeader = 100'000'000;
constexpr std::size_t kMostDimensions = 8;

// Bytes per element of the types of the format; 0: another type.
std::size_t size_of(std::string_view type) {
  if (type == "F64" || type == "I64" || type == "U64") return 8;
  if (type == "F32" || type == "I32" || type == "U32") return 4;
  if (type == "F16" || type == "BF16" || type == "I16" || type == "U16") return 2;
  if (type == "I8" || type == "U8" || type == "BOOL" || type == "F8_E4M3" || type == "F8_E5M2")
    return 1;
  return 0;
}

TensorType tensor_type(std::string_view type) {
  if (type == "F32") return TensorType::kF32;
  if (type == "F16") return TensorType::kF16;
  if (type == "BF16") return TensorType::kBf16;
  return TensorType::kOther;
}

// The size in a JSON number; nothing for any other value.
std::optional<std::uint64_t> as_size(const SortedJson& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  return value.get<std::uint64_t>();
}

// What is wrong with the entry of a tensor, or nothing. Its offsets are relative to the data.
std::optional<std::string> read_entry(const SortedJson& entry, std::size_t data_bytes,
                                      StoredTensor& tensor) {
  if (!entry.is_object()) return "is not an object";
  const auto type = entry.find("dtype");
  const auto shape = entry.find("shape");
  const auto offsets = entry.find("data_offsets");
  if (type == entry.end() || !type->is_string() || shape == entry.end() || !shape->is_array() ||
      offsets == entry.end() || !offsets->is_array() || offsets->size() != 2) {
    return "lacks dtype, shape or data_offsets";
  }
  const auto& type_name = type->get_ref<const std::string&>();
  std::uint64_t bytes = size_of(type_name);
  if (bytes == 0) return fmt::format("has the unknown type {}", type_name);
  tensor.type = tensor_type(type_name);
  if (shape->size() > kMostDimensions) return fmt::format("has {} dimensions", shape->size());
  for (const SortedJson& dimension : *shape) {
    const auto size = as_size(dimension);
    if (!size) return "has a shape that cannot be";
    if (*size > 0 && bytes > data_bytes / *size) return "is larger than the file";
    tensor.shape.push_back(static_cast<std::int64_t>(*size));
    bytes *= *size;
  }
  const auto begin = as_size((*offsets)[0]);
  const auto end = as_size((*offsets)[1]);
  if (!begin || !end || *begin > *end || *end > data_bytes) return "lies outside the file";
  if (*end - *begin != bytes) {
    return fmt::format("has {} bytes, but its shape takes {}", *end - *begin, bytes);
  }
  tensor.begin = *begin;
  tensor.end = *end;
  return std::nullopt;
}

float from_f16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1f;
  const std::uint32_t fraction = half & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0) {
    const float value = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
}

}  // namespace

std::size_t StoredTensor::elements() const {
  std::size_t count = 1;
  for (const std::int64_t size : shape) count *= static_cast<std::size_t>(size);
  return count;
}

std::variant<SafetensorsHeader, SafetensorsProblem> parse_safetensors(
    std::span<const std::byte> file) {
  if (file.size() < kLengthBytes)
    return SafetensorsProblem{file.size(), "the file ends inside its first 8 bytes"};
  const auto length = load_little_endian<std::uint64_t>(file.data());
  if (length > kMostHeader || length > file.size() - kLengthBytes) {
    return SafetensorsProblem{0, fmt::format("a header of {} bytes does not fit the file", length)};
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes, length);
  const SortedJson header = parse_sorted_json(text);
  if (!header.is_object())
    return SafetensorsProblem{kLengthBytes, "the header is not a JSON object"};

  const std::size_t data = kLengthBytes + length;
  SafetensorsHeader tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    StoredTensor tensor{.name = name};
    if (const auto problem = read_entry(entry, file.size() - data, tensor)) {
      return SafetensorsProblem{kLengthBytes, fmt::format("tensor '{}' {}", name, *problem)};
    }
    tensor.begin += data;
    tensor.end += data;
    tensors.push_back(std::move(tensor));
  }
  std::ranges::sort(tensors, [](const StoredTensor& a, const StoredTensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  std::size_t position = data;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.begin != position) {
      return SafetensorsProblem{position,
                                fmt::format("tensor '{}' leaves a gap or overlaps", tensor.name)};
    }
    position = tensor.end;
  }
  if (position != file.size())
    return SafetensorsProblem{position, "bytes that belong to no tensor"};
  return tensors;
}

SafetensorsView::SafetensorsView(std::string path, std::span<const std::byte> file)
    : path_(std::move(path)), file_(file) {
  auto parsed = parse_safetensors(file_);
  if (const auto* problem = std::get_if<SafetensorsProblem>(&parsed)) {
    throw_bad_file(path_, problem->position, problem->what);
  }
  tensors_ = std::get<SafetensorsHeader>(std::move(parsed));
}

const StoredTensor* SafetensorsView::find(std::string_view name) const {
  const auto found = std::ranges::find(tensors_, name, &StoredTensor::name);
  return found == tensors_.end() ? nullptr : &*found;
}

void SafetensorsView::read(const StoredTensor& tensor, std::span<float> out) const {
  if (tensor.elements() != out.size()) {
    throw_bad_file(path_, tensor.begin,
                   fmt::format("tensor '{}' has {} elements, not {}", tensor.name,
                               tensor.elements(), out.size()));
  }
  const std::byte* from = file_.data() + tensor.begin;
  switch (tensor.type) {
    case TensorType::kF32: std::memcpy(out.data(), from, out.size_bytes()); return;
    case TensorType::kF16:
      for (std::size_t i = 0; i < out.size(); ++i) {
        out[i] = from_f16(load_little_endian<std::uint16_t>(from + 2 * i));
      }
      return;
    case TensorType::kBf16:
      for (std::size_t i = 0; i < out.size(); ++i) {
        const std::uint32_t bits = load_little_endian<std::uint16_t>(from + 2 * i);
        out[i] = std::bit_cast<float>(bits << 16);
      }
      return;
    case TensorType::kOther: break;
  }
  throw_bad_file(path_, tensor.begin,
                 fmt::format("tensor '{}' is neither F32, F16 nor BF16", tensor.name));
}

std::string safetensors_head(std::span<const TensorToStore> tensors,
                             const SafetensorsMetadata& metadata) {
  Json header;
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::size_t offset = 0;
  for (const TensorToStore& tensor : tensors) {
    const std::size_t end = offset + tensor.values.size_bytes();
    header[tensor.name] = {
        {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = to_text(header);
  text.append((8 - text.size() % 8) % 8, ' ');  // aligns the data
  ByteWriter length;
  length.u64(text.size());
  return text.insert(0, reinterpret_cast<const char*>(length.written().data()), kLengthBytes);
}

void write_safetensors(const std::string& path, std::span<const TensorToStore> tensors,
                       const SafetensorsMetadata& metadata, const WriteGuard& guard) {
  AtomicFile file(path, guard);
  file.write(safetensors_head(tensors, metadata));
  for (const TensorToStore& tensor : tensors) file.write(std::as_bytes(tensor.values));
  file.commit();
}

}  // namespace lockstep
