#include "cli/allreduce_pattern.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

namespace lockstep::cli {
namespace {

constexpr std::size_t kPeriod = 4093;

// 256 is the last whole number before bf16 has gaps.
unsigned value_of(std::size_t index, int rank, int world_size) {
  const int distinct = std::clamp(256 / world_size, 2, 13);
  return static_cast<unsigned>((index + 5 * static_cast<std::size_t>(rank)) %
                               static_cast<std::size_t>(distinct));
}

std::uint16_t to_f16(unsigned value) {
  if (value == 0) return 0;
  const int exponent = std::bit_width(value) - 1;
  return static_cast<std::uint16_t>(((exponent + 15) << 10) | ((value << (10 - exponent)) & 0x3ff));
}

std::uint16_t to_bf16(unsigned value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16);
}

template <typename T>
void put(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

void put_value(DataType type, std::byte* to, unsigned value) {
  switch (type) {
    case DataType::kF32: return put(to, static_cast<float>(value));
    case DataType::kF64: return put(to, static_cast<double>(value));
    case DataType::kF16: return put(to, to_f16(value));
    case DataType::kBf16: return put(to, to_bf16(value));
    case DataType::kI32: return put(to, static_cast<std::int32_t>(value));
    case DataType::kI64: return put(to, static_cast<std::int64_t>(value));
    case DataType::kU8: return put(to, static_cast<std::uint8_t>(value));
  }
}

}  // namespace

AllReducePattern::AllReducePattern(DataType type, int rank, int world_size)
    : type_(type), input_(kPeriod * size_of(type)), expected_(kPeriod * size_of(type)) {
  for (std::size_t i = 0; i < kPeriod; ++i) {
    unsigned sum = 0;
    for (int r = 0; r < world_size; ++r) sum += value_of(i, r, world_size);
    put_value(type, input_.data() + i * size_of(type), value_of(i, rank, world_size));
    put_value(type, expected_.data() + i * size_of(type), sum);
  }
}

void AllReducePattern::write_input(BufferView data) const {
  for (std::size_t done = 0; done < data.bytes(); done += input_.size()) {
    std::memcpy(data.data() + done, input_.data(), std::min(input_.size(), data.bytes() - done));
  }
}

std::optional<std::size_t> AllReducePattern::find_difference(ConstBufferView data) const {
  for (std::size_t done = 0; done < data.bytes(); done += expected_.size()) {
    const std::size_t count = std::min(expected_.size(), data.bytes() - done);
    if (std::memcmp(data.data() + done, expected_.data(), count) == 0) continue;
    const auto [at, unused] =
        std::mismatch(data.data() + done, data.data() + done + count, expected_.data());
    return static_cast<std::size_t>(at - data.data()) / size_of(type_);
  }
  return std::nullopt;
}

}  // namespace lockstep::cli
