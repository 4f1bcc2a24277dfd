#pragma once

#include <cmath>
#include <concepts>
#include <limits>
#include <optional>

namespace lockstep {

// The whole number that `value` is. Nothing for fractions, for what is not finite and for what
// Number cannot hold, all of which would make a cast undefined or wrong.
template <std::integral Number>
std::optional<Number> whole_number(double value) {
  // Both bounds are powers of two, or zero: exact as doubles. The upper one is the first too large.
  constexpr int kBits = std::numeric_limits<Number>::digits;
  const double end = std::ldexp(1.0, kBits);
  const double begin = std::is_signed_v<Number> ? -end : 0.0;
  if (!(value >= begin && value < end) || value != std::trunc(value)) return std::nullopt;
  return static_cast<Number>(value);
}

}  // namespace lockstep
