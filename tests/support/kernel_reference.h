#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "lockstep/comm/types.h"

namespace lockstep::reference {

// What kernels.h promises, one element after the other, on bit patterns and by other means than the
// kernels: the 16-bit types round through ldexp and nearbyint in f64.

inline constexpr std::uint16_t kF16Nan = 0x7e00;
inline constexpr std::uint16_t kBf16Nan = 0x7fc0;

inline float f16_value(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  double value = 0;
  if (exponent == 31) {
    value = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                          : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, -24);
  } else {
    value = std::ldexp(1024 + mantissa, exponent - 25);
  }
  return static_cast<float>((bits & 0x8000) != 0 ? -value : value);
}

inline float bf16_value(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

// |value| to `precision` bits, to nearest even; exponents below `least` are denormal.
inline double rounded(double value, int precision, int least) {
  if (value == 0 || std::isinf(value)) return value;
  const int quantum = std::max(std::ilogb(value), least) - (precision - 1);
  return std::ldexp(std::nearbyint(std::ldexp(value, -quantum)), quantum);
}

inline std::uint16_t f16_bits(float value) {
  if (std::isnan(value)) return kF16Nan;
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const double r = rounded(std::fabs(value), 11, -14);
  int magnitude = 0;
  if (r >= 65536) {
    magnitude = 0x7c00;
  } else if (r < std::ldexp(1, -14)) {
    magnitude = static_cast<int>(std::ldexp(r, 24));
  } else {
    const int exponent = std::ilogb(r);
    magnitude = ((exponent + 14) << 10) + static_cast<int>(std::ldexp(r, 10 - exponent));
  }
  return static_cast<std::uint16_t>(sign | magnitude);
}

inline std::uint16_t bf16_bits(float value) {
  if (std::isnan(value)) return kBf16Nan;
  const double r = rounded(std::fabs(value), 8, -126);
  const float narrow =
      r >= std::ldexp(1, 128) ? std::numeric_limits<float>::infinity() : static_cast<float>(r);
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(std::copysign(narrow, value)) >>
                                    16);
}

template <typename T>
T canonical(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return std::isnan(value) ? std::bit_cast<float>(0x7fc00000U) : value;
  } else {
    return std::isnan(value) ? std::bit_cast<double>(std::uint64_t{0x7ff8000000000000}) : value;
  }
}

template <typename T>
T combine_floats(ReduceOp op, T a, T b) {
  const bool extreme = op == ReduceOp::kMin || op == ReduceOp::kMax;
  if (extreme && (std::isnan(a) || std::isnan(b))) {
    return canonical(std::numeric_limits<T>::quiet_NaN());
  }
  const bool a_is_less = a < b || (a == b && std::signbit(a));
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean: return canonical(a + b);
    case ReduceOp::kProduct: return canonical(a * b);
    case ReduceOp::kMin: return a_is_less ? a : b;
    case ReduceOp::kMax: return a_is_less ? b : a;
  }
  return a;
}

template <typename T>
T combine_integers(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean: return static_cast<T>(std::uint64_t(a) + std::uint64_t(b));
    case ReduceOp::kProduct: return static_cast<T>(std::uint64_t(a) * std::uint64_t(b));
    case ReduceOp::kMin: return std::min(a, b);
    case ReduceOp::kMax: return std::max(a, b);
  }
  return a;
}

template <typename T>
T floor_mean(T value, int n) {
  const std::int64_t wide = value;
  return static_cast<T>(wide / n - (wide % n < 0 ? 1 : 0));
}

// Calls visit(load, store): load(p) reads an element as what is computed with, store(p, v) writes.
template <typename Visitor>
void with_type(DataType type, Visitor visit) {
  const auto plain = [&]<typename T>(T) {
    visit(
        [](const void* p) {
          T value;
          std::memcpy(&value, p, sizeof(T));
          return value;
        },
        [](void* p, T value) { std::memcpy(p, &value, sizeof(T)); });
  };
  const auto half = [&](float (*value_of)(std::uint16_t), std::uint16_t (*bits_of)(float)) {
    visit(
        [=](const void* p) {
          std::uint16_t bits;
          std::memcpy(&bits, p, 2);
          return value_of(bits);
        },
        [=](void* p, float value) {
          const std::uint16_t bits = bits_of(value);
          std::memcpy(p, &bits, 2);
        });
  };
  switch (type) {
    case DataType::kF32: return plain(float{});
    case DataType::kF64: return plain(double{});
    case DataType::kF16: return half(f16_value, f16_bits);
    case DataType::kBf16: return half(bf16_value, bf16_bits);
    case DataType::kI32: return plain(std::int32_t{});
    case DataType::kI64: return plain(std::int64_t{});
    case DataType::kU8: return plain(std::uint8_t{});
  }
}

inline void combine(ReduceOp op, DataType type, void* dst, const void* lhs, const void* rhs,
                    std::size_t count = 1) {
  with_type(type, [&](auto load, auto store) {
    using T = decltype(load(lhs));
    for (std::size_t at = 0; at < count * size_of(type); at += size_of(type)) {
      const T a = load(static_cast<const std::byte*>(lhs) + at);
      const T b = load(static_cast<const std::byte*>(rhs) + at);
      std::byte* const to = static_cast<std::byte*>(dst) + at;
      if constexpr (std::is_floating_point_v<T>) {
        store(to, combine_floats(op, a, b));
      } else {
        store(to, combine_integers(op, a, b));
      }
    }
  });
}

inline void finish_mean(DataType type, void* data, int n, std::size_t count = 1) {
  with_type(type, [&](auto load, auto store) {
    using T = decltype(load(data));
    for (std::size_t at = 0; at < count * size_of(type); at += size_of(type)) {
      std::byte* const element = static_cast<std::byte*>(data) + at;
      const T value = load(element);
      if constexpr (std::is_floating_point_v<T>) {
        store(element, canonical(value * (T{1} / static_cast<T>(n))));
      } else {
        store(element, floor_mean(value, n));
      }
    }
  });
}

}  // namespace lockstep::reference
