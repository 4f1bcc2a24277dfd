// The loops of kernels.h, written for the compiler to vectorise. Each kernels_*.cc defines
// LOCKSTEP_KERNEL_TABLE and LOCKSTEP_KERNEL_NAME and includes this file once.
//
// All of it has internal linkage and calls no inline function of another header: such a function,
// compiled here for a new processor, could be the one copy that the linker keeps for everybody.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "lockstep/comm/kernels/table.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

// Iterations are independent even when dst is lhs or rhs; compilers cannot know.
#ifdef __clang__
#pragma clang diagnostic ignored "-Wpass-failed"
#define LOCKSTEP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define LOCKSTEP_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace lockstep {
namespace {

// An element in memory: of any alignment, and whatever type the owner gave it.
template <typename T>
struct [[gnu::packed, gnu::may_alias]] Cell {
  T value;
};

template <typename T>
const Cell<T>* cells(const void* data) {
  return static_cast<const Cell<T>*>(data);
}

template <typename T>
Cell<T>* cells(void* data) {
  return static_cast<Cell<T>*>(data);
}

template <typename Float>
struct Layout;
template <>
struct Layout<float> {
  using Bits = std::uint32_t;
  using Signed = std::int32_t;
  static constexpr Bits kExponent = 0x7f800000;
  static constexpr Bits kNan = 0x7fc00000;
};
template <>
struct Layout<double> {
  using Bits = std::uint64_t;
  using Signed = std::int64_t;
  static constexpr Bits kExponent = 0x7ff0000000000000;
  static constexpr Bits kNan = 0x7ff8000000000000;
};

// Maps non-NaN floats to integers of the same order with -0 < +0; its own inverse on integers.
template <typename Signed>
Signed flip_negative(Signed bits) {
  constexpr auto kMagnitude =
      static_cast<Signed>(static_cast<std::make_unsigned_t<Signed>>(-1) >> 1);
  return bits ^ ((bits >> (8 * sizeof(Signed) - 1)) & kMagnitude);
}

// Operations. A NaN that comes out of them has any bits; storing makes it canonical. (x86 hands
// on the first operand's, and compilers are free to swap operands.)

struct Sum {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return a + b;
    if constexpr (std::is_integral_v<T>) {
      using Wrapping = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
    }
  }
};

struct Product {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_floating_point_v<T>) return a * b;
    if constexpr (std::is_integral_v<T>) {
      using Wrapping = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<Wrapping>(a) * static_cast<Wrapping>(b));
    }
  }
};

template <bool kMax>
struct Extreme {
  template <typename T>
  static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) return ((a < b) != kMax) ? a : b;
    if constexpr (std::is_floating_point_v<T>) {
      using Signed = typename Layout<T>::Signed;
      const Signed left = flip_negative(__builtin_bit_cast(Signed, a));
      const Signed right = flip_negative(__builtin_bit_cast(Signed, b));
      const Signed chosen = flip_negative(((left < right) != kMax) ? left : right);
      const bool any_nan = (a != a) | (b != b);
      return __builtin_bit_cast(T, any_nan ? static_cast<Signed>(Layout<T>::kNan) : chosen);
    }
  }
};

// Types: what is stored, what is computed with, and the way between. A stored NaN is canonical.

template <typename T>
struct Integer {
  using Stored = T;
  static T load(T stored) { return stored; }
  static T store(T value) { return value; }
};

template <typename T>
struct Real {
  using Stored = T;
  static T load(T stored) { return stored; }
  static T store(T value) {
    return value != value ? __builtin_bit_cast(T, Layout<T>::kNan) : value;
  }
};

struct Bf16 {
  using Stored = std::uint16_t;
  static float load(std::uint16_t stored) {
    return __builtin_bit_cast(float, std::uint32_t{stored} << 16);
  }
  static std::uint16_t store(float value) {
    const auto bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<std::uint16_t>(value != value ? 0x7fc0 : rounded);
  }
};

// Converted in blocks, see below.
struct F16 {
  using Stored = std::uint16_t;
};

float f16_to_f32(std::uint16_t stored) {
  const std::uint32_t magnitude = stored & 0x7fffU;
  const std::uint32_t sign = (stored & 0x8000U) << 16;
  const std::uint32_t rebias = magnitude >= 0x7c00 ? (255U - 31U) << 23 : (127U - 15U) << 23;
  const std::uint32_t normal = (magnitude << 13) + rebias;
  // A denormal counts units of 2^-24; the product is exact.
  const auto denormal = __builtin_bit_cast(
      std::uint32_t, static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24F);
  return __builtin_bit_cast(float, sign | (magnitude < 0x0400 ? denormal : normal));
}

std::uint16_t f32_to_f16(float value) {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  const std::uint32_t magnitude = bits & 0x7fffffff;
  // Rounding may carry into the exponent, which is right, up to infinity.
  const std::uint32_t normal =
      (magnitude - ((127U - 15U) << 23) + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
  // The last bit of 0.5 + x is 2^-24, the unit of denormals.
  const float shifted = __builtin_bit_cast(float, magnitude) + 0.5F;
  const std::uint32_t denormal = __builtin_bit_cast(std::uint32_t, shifted) - 0x3f000000;
  std::uint32_t result = magnitude < 0x38800000 ? denormal : normal;
  result = magnitude >= 0x47800000 ? 0x7c00 : result;
  return static_cast<std::uint16_t>(magnitude > 0x7f800000 ? 0x7e00 : (sign | result));
}

// f16 goes through f32 in blocks that stay in the first-level cache, so that the processor's own
// conversion serves where there is one.
constexpr std::size_t kF16Block = 512;

#ifdef __F16C__
constexpr std::size_t kF16Lanes = 8;
void widen_lanes(const void* from, float* to) {
  const __m128i packed = _mm_loadu_si128(static_cast<const __m128i_u*>(from));
  _mm256_storeu_ps(to, _mm256_cvtph_ps(packed));
}
void narrow_lanes(const float* from, void* to) {
  const __m128i packed = _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(static_cast<__m128i_u*>(to), packed);
}
#else
constexpr std::size_t kF16Lanes = 1;
void widen_lanes(const void* from, float* to) {
  *to = f16_to_f32(cells<std::uint16_t>(from)->value);
}
void narrow_lanes(const float* from, void* to) {
  cells<std::uint16_t>(to)->value = f32_to_f16(*from);
}
#endif

void widen(const Cell<std::uint16_t>* from, float* to, std::size_t count) {
  const std::size_t whole = count - count % kF16Lanes;
  for (std::size_t i = 0; i < whole; i += kF16Lanes) widen_lanes(from + i, to + i);
  for (std::size_t i = whole; i < count; ++i) to[i] = f16_to_f32(from[i].value);
}

// `from` holds no NaN but the canonical one, which both ways map to 0x7e00.
void narrow(const float* from, Cell<std::uint16_t>* to, std::size_t count) {
  const std::size_t whole = count - count % kF16Lanes;
  for (std::size_t i = 0; i < whole; i += kF16Lanes) narrow_lanes(from + i, to + i);
  for (std::size_t i = whole; i < count; ++i) to[i].value = f32_to_f16(from[i]);
}

// dst[i] = Op(lhs[i], rhs[i])
template <typename Type, typename Op>
void combine_loop(void* dst, const void* lhs, const void* rhs, std::size_t count) {
  using Stored = typename Type::Stored;
  auto* out = cells<Stored>(dst);
  const auto* left = cells<Stored>(lhs);
  const auto* right = cells<Stored>(rhs);
  if constexpr (std::is_same_v<Type, F16>) {
    float wide_left[kF16Block];
    float wide_right[kF16Block];
    for (std::size_t i = 0; i < count; i += kF16Block) {
      const std::size_t size = count - i < kF16Block ? count - i : kF16Block;
      widen(left + i, wide_left, size);
      widen(right + i, wide_right, size);
      combine_loop<Real<float>, Op>(wide_left, wide_left, wide_right, size);
      narrow(wide_left, out + i, size);
    }
  } else {
    LOCKSTEP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
      out[i].value = Type::store(Op::apply(Type::load(left[i].value), Type::load(right[i].value)));
    }
  }
}

template <typename T>
T floor_quotient(T value, T divisor) {
  const auto quotient = static_cast<T>(value / divisor);
  const bool rounded_up = value < 0 && quotient * divisor != value;
  return static_cast<T>(quotient - (rounded_up ? 1 : 0));
}

// dst[i] = src[i] / n
template <typename Type>
void mean_loop(void* dst, const void* src, std::size_t count, int n) {
  using Stored = typename Type::Stored;
  auto* out = cells<Stored>(dst);
  const auto* in = cells<Stored>(src);
  if constexpr (std::is_same_v<Type, F16>) {
    float wide[kF16Block];
    for (std::size_t i = 0; i < count; i += kF16Block) {
      const std::size_t size = count - i < kF16Block ? count - i : kF16Block;
      widen(in + i, wide, size);
      mean_loop<Real<float>>(wide, wide, size, n);
      narrow(wide, out + i, size);
    }
  } else if constexpr (std::is_same_v<Type, Integer<Stored>>) {
    // A u8 divisor need not fit u8, so small integers divide as int.
    using Wide = decltype(Stored{} + int{});
    for (std::size_t i = 0; i < count; ++i) {
      out[i].value = static_cast<Stored>(floor_quotient<Wide>(in[i].value, n));
    }
  } else {
    const auto factor = static_cast<decltype(Type::load(Stored{}))>(1.0 / n);
    LOCKSTEP_INDEPENDENT
    for (std::size_t i = 0; i < count; ++i) {
      out[i].value = Type::store(Type::load(in[i].value) * factor);
    }
  }
}

// reduce_tree works in strips: one program run per strip, small enough that all inputs stream
// from memory side by side, while what lies kAhead is fetched.
constexpr std::size_t kStripBytes = 512;
constexpr std::size_t kAhead = 2048;

template <typename Type, typename Op>
[[gnu::always_inline]] inline void reduce_strip(const TreeLoop& loop, std::size_t offset,
                                                std::size_t count) {
  alignas(64) unsigned char slots[kMaxTreeDepth][kStripBytes];
  const void* stack[kMaxTreeDepth];
  std::size_t height = 0;
  const void* const* input = loop.inputs;
  const bool fetch = offset + kAhead + kStripBytes <= loop.count * sizeof(typename Type::Stored);
  for (std::size_t step = 0; step < loop.steps; ++step) {
    if (loop.program[step].push) {
      const auto* strip = static_cast<const unsigned char*>(*input++) + offset;
      for (std::size_t line = 0; fetch && line < kStripBytes; line += 64) {
        __builtin_prefetch(strip + kAhead + line);
      }
      stack[height++] = strip;
    } else {
      --height;
      void* slot = slots[height - 1];
      combine_loop<Type, Op>(slot, stack[height - 1], stack[height], count);
      stack[height - 1] = slot;
    }
  }
  if (loop.op == ReduceOp::kMean) {
    mean_loop<Type>(slots[0], stack[0], count, loop.mean_of);
    stack[0] = slots[0];
  }
  // All inputs of the strip have been read, so outputs may be inputs.
  for (std::size_t i = 0; i < loop.output_count; ++i) {
    auto* output = static_cast<unsigned char*>(loop.outputs[i]) + offset;
    if (output != stack[0]) {
      __builtin_memcpy(output, stack[0], count * sizeof(typename Type::Stored));
    }
  }
}

template <typename Type, typename Op>
void reduce_tree_loop(const TreeLoop& loop) {
  constexpr std::size_t kSize = sizeof(typename Type::Stored);
  constexpr std::size_t kStrip = kStripBytes / kSize;
  const std::size_t whole = loop.count - loop.count % kStrip;
  // A constant count gives loops without ends and corners.
  for (std::size_t i = 0; i < whole; i += kStrip) reduce_strip<Type, Op>(loop, i * kSize, kStrip);
  if (whole < loop.count) reduce_strip<Type, Op>(loop, whole * kSize, loop.count - whole);
}

// An element is not finite when its exponent bits are all ones.
template <typename Bits, Bits kExponent>
std::size_t find_exponent(const void* data, std::size_t count) {
  constexpr std::size_t kBlock = 1024;
  const auto* elements = cells<Bits>(data);
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = count - begin < kBlock ? count - begin : kBlock;
    Bits largest = 0;
    for (std::size_t i = 0; i < size; ++i) {
      const auto exponent = static_cast<Bits>(elements[begin + i].value & kExponent);
      largest = exponent > largest ? exponent : largest;
    }
    if (largest != kExponent) continue;
    for (std::size_t i = begin;; ++i) {
      if ((elements[i].value & kExponent) == kExponent) return i;
    }
  }
  return count;
}

template <typename Visitor>
void with_type(DataType type, Visitor visit) {
  switch (type) {
    case DataType::kF32: return visit(Real<float>{});
    case DataType::kF64: return visit(Real<double>{});
    case DataType::kF16: return visit(F16{});
    case DataType::kBf16: return visit(Bf16{});
    case DataType::kI32: return visit(Integer<std::int32_t>{});
    case DataType::kI64: return visit(Integer<std::int64_t>{});
    case DataType::kU8: return visit(Integer<std::uint8_t>{});
  }
}

template <typename Visitor>
void with_op(ReduceOp op, Visitor visit) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean: return visit(Sum{});
    case ReduceOp::kMin: return visit(Extreme<false>{});
    case ReduceOp::kMax: return visit(Extreme<true>{});
    case ReduceOp::kProduct: return visit(Product{});
  }
}

void combine_any(ReduceOp op, DataType type, void* dst, const void* lhs, const void* rhs,
                 std::size_t count) {
  with_op(op, [&]<typename Op>(Op) {
    with_type(type, [&]<typename Type>(Type) { combine_loop<Type, Op>(dst, lhs, rhs, count); });
  });
}

void finish_mean_any(DataType type, void* data, std::size_t count, int n) {
  with_type(type, [&]<typename Type>(Type) { mean_loop<Type>(data, data, count, n); });
}

void reduce_tree_any(const TreeLoop& loop) {
  with_op(loop.op, [&]<typename Op>(Op) {
    with_type(loop.type, [&]<typename Type>(Type) { reduce_tree_loop<Type, Op>(loop); });
  });
}

std::size_t find_non_finite_any(DataType type, const void* data, std::size_t count) {
  switch (type) {
    case DataType::kF32: return find_exponent<std::uint32_t, Layout<float>::kExponent>(data, count);
    case DataType::kF64:
      return find_exponent<std::uint64_t, Layout<double>::kExponent>(data, count);
    case DataType::kF16: return find_exponent<std::uint16_t, 0x7c00>(data, count);
    case DataType::kBf16: return find_exponent<std::uint16_t, 0x7f80>(data, count);
    case DataType::kI32:
    case DataType::kI64:
    case DataType::kU8: break;
  }
  return count;
}

}  // namespace

const KernelTable LOCKSTEP_KERNEL_TABLE = {LOCKSTEP_KERNEL_NAME, combine_any, finish_mean_any,
                                           reduce_tree_any, find_non_finite_any};

}  // namespace lockstep
