#include "lockstep/train/bf16_wire.h"

#include <bit>
#include <cstdint>

#include "lockstep/base/check.h"

namespace lockstep {
namespace {

std::uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t nearest = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const bool nan = (bits & 0x7fffffffU) > 0x7f800000U;
  return static_cast<std::uint16_t>(nan ? 0x7fc0U : nearest);
}

float to_float(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

}  // namespace

void round_with_feedback(std::span<const float> sum, std::span<float> residual,
                         std::span<BFloat16> rounded) {
  LOCKSTEP_CHECK(sum.size() == residual.size() && sum.size() == rounded.size());
  for (std::size_t i = 0; i < sum.size(); ++i) {
    const float value = sum[i] + residual[i];
    const std::uint16_t bits = to_bf16(value);
    rounded[i] = static_cast<BFloat16>(bits);
    residual[i] = value - to_float(bits);
  }
}

void widen(std::span<const BFloat16> values, std::span<float> out) {
  LOCKSTEP_CHECK(values.size() == out.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    out[i] = to_float(static_cast<std::uint16_t>(values[i]));
  }
}

}  // namespace lockstep
