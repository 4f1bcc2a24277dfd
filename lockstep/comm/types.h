#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "lockstep/base/range.h"

namespace lockstep {

// Values of these two are part of the mesh protocol (docs/mesh_protocol.md).
enum class DataType : std::uint8_t { kF32, kF64, kF16, kBf16, kI32, kI64, kU8 };
enum class ReduceOp : std::uint8_t { kSum, kMean, kMin, kMax, kProduct };

// Whether bytes between hosts are compressed, without loss. Every process decides for what it
// sends.
enum class WireCompression : std::uint8_t {
  kAuto,  // where the link is slow beside the processor
  kOn,
  kOff,
};

constexpr std::size_t size_of(DataType type) {
  switch (type) {
    case DataType::kF64:
    case DataType::kI64: return 8;
    case DataType::kF32:
    case DataType::kI32: return 4;
    case DataType::kF16:
    case DataType::kBf16: return 2;
    case DataType::kU8: return 1;
  }
  return 0;
}

std::string_view to_string(DataType type);
std::string_view to_string(ReduceOp op);
std::string_view to_string(WireCompression compression);

// Storage of the 16-bit floating-point types; arithmetic happens in f32.
enum class Float16 : std::uint16_t {};
enum class BFloat16 : std::uint16_t {};

template <typename T>
struct DataTypeOf;
template <>
struct DataTypeOf<float> {
  static constexpr DataType value = DataType::kF32;
};
template <>
struct DataTypeOf<double> {
  static constexpr DataType value = DataType::kF64;
};
template <>
struct DataTypeOf<Float16> {
  static constexpr DataType value = DataType::kF16;
};
template <>
struct DataTypeOf<BFloat16> {
  static constexpr DataType value = DataType::kBf16;
};
template <>
struct DataTypeOf<std::int32_t> {
  static constexpr DataType value = DataType::kI32;
};
template <>
struct DataTypeOf<std::int64_t> {
  static constexpr DataType value = DataType::kI64;
};
template <>
struct DataTypeOf<std::uint8_t> {
  static constexpr DataType value = DataType::kU8;
};

// Non-owning view of `count` elements. Bytes are derived, never passed.
class ConstBufferView {
 public:
  ConstBufferView(const void* data, std::size_t count, DataType type)
      : data_(static_cast<const std::byte*>(data)), count_(count), type_(type) {}
  template <typename T>
  ConstBufferView(std::span<const T> elements)  // NOLINT(google-explicit-constructor)
      : ConstBufferView(elements.data(), elements.size(), DataTypeOf<T>::value) {}

  const std::byte* data() const { return data_; }
  std::size_t count() const { return count_; }
  DataType type() const { return type_; }
  std::size_t bytes() const { return count_ * size_of(type_); }
  ConstBufferView slice(Range range) const {
    return {data_ + range.begin * size_of(type_), range.size(), type_};
  }

 private:
  const std::byte* data_;
  std::size_t count_;
  DataType type_;
};

class BufferView {
 public:
  BufferView(void* data, std::size_t count, DataType type)
      : data_(static_cast<std::byte*>(data)), count_(count), type_(type) {}
  template <typename T>
  BufferView(std::span<T> elements)  // NOLINT(google-explicit-constructor)
      : BufferView(elements.data(), elements.size(), DataTypeOf<T>::value) {}

  operator ConstBufferView() const { return {data_, count_, type_}; }  // NOLINT

  std::byte* data() const { return data_; }
  std::size_t count() const { return count_; }
  DataType type() const { return type_; }
  std::size_t bytes() const { return count_ * size_of(type_); }
  BufferView slice(Range range) const {
    return {data_ + range.begin * size_of(type_), range.size(), type_};
  }

 private:
  std::byte* data_;
  std::size_t count_;
  DataType type_;
};

}  // namespace lockstep
