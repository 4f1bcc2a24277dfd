#include "lockstep/train/formats/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "lockstep/files/atomic_file.h"
#include "lockstep/files/hashed_read.h"
#include "lockstep/files/json.h"
#include "lockstep/files/mapped_file.h"
#include "lockstep/wire/bytes.h"

namespace lockstep {
namespace {

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kMostHeader = 100'000'000;
constexpr std::size_t kMostDimensions = 8;

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
  std::uint64_t bytes = safetensors_type_bytes(type_name);
  if (bytes == 0) return fmt::format("has the unknown type {}", type_name);
  tensor.type = tensor_type(type_name);
  tensor.type_name = type_name;
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

// Puts what a block has of a tensor of two bytes an element into its place. An element belongs to
// the block in which it begins: `bytes` are those from `position` on, up to `end`, and one more.
void convert_halves(std::uint64_t position, std::uint64_t end, std::span<const std::byte> bytes,
                    const SafetensorsFile::Target& target) {
  constexpr std::size_t kWidth = 2;
  const StoredTensor& tensor = *target.tensor;
  const std::uint64_t begin = std::max<std::uint64_t>(tensor.begin, position);
  for (std::size_t i = (begin - tensor.begin + kWidth - 1) / kWidth;
       tensor.begin + i * kWidth < std::min<std::uint64_t>(tensor.end, end); ++i) {
    const auto bits =
        load_little_endian<std::uint16_t>(bytes.data() + (tensor.begin + i * kWidth - position));
    target.values[i] = tensor.type == TensorType::kF16
                           ? from_f16(bits)
                           : std::bit_cast<float>(std::uint32_t{bits} << 16);
  }
}

// Reads what a block has of the tensors, which are in the order of the file. Elements of four bytes
// need no conversion: they go straight to their places, and may come in parts.
void read_block(BlockReader& block, std::span<const SafetensorsFile::Target> targets) {
  const bool straight = std::ranges::all_of(targets, [](const SafetensorsFile::Target& target) {
    return target.tensor->type == TensorType::kF32;
  });
  if (straight) {
    for (const auto& [tensor, values] : targets) {
      const std::uint64_t begin = std::max<std::uint64_t>(tensor->begin, block.at());
      const std::uint64_t end = std::min<std::uint64_t>(tensor->end, block.end());
      block.skip_to(begin);
      block.read_to(std::as_writable_bytes(values).subspan(begin - tensor->begin, end - begin));
    }
    return;
  }
  const std::uint64_t position = block.at();
  const auto bytes = block.read_rest(1);
  for (const SafetensorsFile::Target& target : targets) {
    const StoredTensor& tensor = *target.tensor;
    if (tensor.type != TensorType::kF32) {
      convert_halves(position, block.end(), bytes, target);
      continue;
    }
    const std::uint64_t begin = std::max<std::uint64_t>(tensor.begin, position);
    const std::uint64_t end = std::min<std::uint64_t>(tensor.end, block.end());
    std::ranges::copy(bytes.subspan(begin - position, end - begin),
                      std::as_writable_bytes(target.values).subspan(begin - tensor.begin).begin());
  }
}

}  // namespace

std::size_t StoredTensor::elements() const {
  std::size_t count = 1;
  for (const std::int64_t size : shape) count *= static_cast<std::size_t>(size);
  return count;
}

std::size_t safetensors_type_bytes(std::string_view type) {
  if (type == "F64" || type == "I64" || type == "U64" || type == "C64") return 8;
  if (type == "F32" || type == "I32" || type == "U32") return 4;
  if (type == "F16" || type == "BF16" || type == "I16" || type == "U16") return 2;
  if (type == "I8" || type == "U8" || type == "BOOL" || type == "F8_E4M3" || type == "F8_E5M2")
    return 1;
  return 0;
}

std::uint64_t safetensors_head_bytes(std::span<const std::byte> begin, std::uint64_t file_bytes) {
  if (file_bytes < kLengthBytes) return file_bytes;
  const auto length = load_little_endian<std::uint64_t>(begin.data());
  const bool fits = length <= kMostHeader && length <= file_bytes - kLengthBytes;
  return kLengthBytes + (fits ? length : 0);
}

std::variant<SafetensorsHeader, SafetensorsProblem> parse_safetensors(
    std::span<const std::byte> head, std::uint64_t file_bytes) {
  if (file_bytes < kLengthBytes)
    return SafetensorsProblem{file_bytes, "the file ends inside its first 8 bytes"};
  const auto length = load_little_endian<std::uint64_t>(head.data());
  if (length > kMostHeader || length > head.size() - kLengthBytes) {
    return SafetensorsProblem{0, fmt::format("a header of {} bytes does not fit the file", length)};
  }
  const std::string_view text(reinterpret_cast<const char*>(head.data()) + kLengthBytes, length);
  const SortedJson header = parse_sorted_json(text);
  if (!header.is_object())
    return SafetensorsProblem{kLengthBytes, "the header is not a JSON object"};

  const std::size_t data = kLengthBytes + length;
  SafetensorsHeader tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    StoredTensor tensor{.name = name};
    if (const auto problem = read_entry(entry, file_bytes - data, tensor)) {
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
  if (position != file_bytes) return SafetensorsProblem{position, "bytes that belong to no tensor"};
  return tensors;
}

SafetensorsFile::SafetensorsFile(FileSource& files, std::string name)
    : files_(files), name_(std::move(name)), bytes_(files.size(name_)) {
  head_.resize(std::min<std::uint64_t>(bytes_, kLengthBytes));
  files_.read(name_, 0, head_);
  head_.resize(safetensors_head_bytes(head_, bytes_));
  files_.read(name_, 0, head_);
  auto parsed = parse_safetensors(head_, bytes_);
  if (const auto* problem = std::get_if<SafetensorsProblem>(&parsed)) {
    throw_bad_file(path(), problem->position, problem->what);
  }
  tensors_ = std::get<SafetensorsHeader>(std::move(parsed));
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = std::ranges::find(tensors_, name, &StoredTensor::name);
  return found == tensors_.end() ? nullptr : &*found;
}

std::string SafetensorsFile::metadata(const char* key) const {
  const Json header = parse_json(as_text(std::span(head_).subspan(kLengthBytes)));
  const auto metadata = header.find("__metadata__");
  if (metadata == header.end() || !metadata->is_object()) return {};
  const auto value = metadata->find(key);
  return value != metadata->end() && value->is_string() ? value->get<std::string>() : std::string();
}

SafetensorsFile::Target SafetensorsFile::target(const std::string& name,
                                                std::span<float> values) const {
  const StoredTensor* tensor = find(name);
  if (tensor == nullptr) throw_bad_file(path(), fmt::format("tensor '{}' is missing", name));
  if (tensor->elements() != values.size()) {
    throw_bad_file(path(), tensor->begin,
                   fmt::format("tensor '{}' has {} elements, not {}", name, tensor->elements(),
                               values.size()));
  }
  if (tensor->type == TensorType::kOther) {
    throw_bad_file(path(), tensor->begin,
                   fmt::format("tensor '{}' is neither F32, F16 nor BF16", name));
  }
  return {tensor, values};
}

Blake3Hash SafetensorsFile::read(std::vector<Target> targets) const {
  std::ranges::sort(targets, {}, [](const Target& target) { return target.tensor->begin; });
  return read_and_hash(
      bytes_,
      [&](std::uint64_t position, std::span<std::byte> into) {
        files_.read(name_, position, into);
      },
      [&](BlockReader& block) {
        const auto first = std::ranges::upper_bound(
            targets, block.at(), {}, [](const Target& each) { return each.tensor->end; });
        const auto last =
            std::ranges::lower_bound(first, targets.end(), block.end(), {},
                                     [](const Target& each) { return each.tensor->begin; });
        read_block(block, {first, last});
      });
}

std::string safetensors_head(std::span<const TensorToStore> tensors,
                             const SafetensorsMetadata& metadata) {
  Json header;
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::size_t offset = 0;
  for (const TensorToStore& tensor : tensors) {
    const std::size_t end = offset + tensor.bytes.size();
    header[tensor.name] = {
        {"dtype", tensor.type}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = to_text(header);
  text.append((8 - text.size() % 8) % 8, ' ');  // aligns the data
  ByteWriter length;
  length.u64(text.size());
  return text.insert(0, reinterpret_cast<const char*>(length.written().data()), kLengthBytes);
}

void write_safetensors(const std::string& path, std::span<const TensorToStore> tensors,
                       const SafetensorsMetadata& metadata, const WriteGuard& guard,
                       Storage& storage) {
  AtomicFile file(path, guard, storage);
  file.write(safetensors_head(tensors, metadata));
  for (const TensorToStore& tensor : tensors) file.write(tensor.bytes);
  file.commit();
}

}  // namespace lockstep
