#include "lockstep/comm/kernels/kernels.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/comm/kernels/table.h"
#include "tests/support/kernel_reference.h"
#include "tests/support/printing.h"

namespace lockstep::kernels_test {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr DataType kTypes[] = {DataType::kF32, DataType::kF64, DataType::kF16, DataType::kBf16,
                               DataType::kI32, DataType::kI64, DataType::kU8};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};

// Bit patterns that have gone wrong before somewhere: zeros, denormals, the ends of the range,
// infinities, NaNs of all kinds, halves between two values of a 16-bit type.
std::vector<std::uint64_t> special_patterns(DataType type) {
  switch (type) {
    case DataType::kF32:
      return {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000,
              0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7f800001, 0x7fc00001,
              0xffc00000, 0xffffffff, 0x3f800000, 0xbf800000, 0x34000000, 0x33800000};
    case DataType::kF64:
      return {0x0000000000000000, 0x8000000000000000, 0x0000000000000001, 0x800fffffffffffff,
              0x0010000000000000, 0x7fefffffffffffff, 0xffefffffffffffff, 0x7ff0000000000000,
              0xfff0000000000000, 0x7ff0000000000001, 0xfff8000000000000, 0x7ff800000000dead,
              0x3ff0000000000000, 0xbff0000000000000, 0x3cb0000000000000};
    case DataType::kF16:
      return {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x83ff, 0x7bff, 0xfbff, 0x7c00,
              0xfc00, 0x7c01, 0x7e01, 0xfe00, 0xffff, 0x3c00, 0xbc00, 0x1000, 0x4c00, 0x4c80};
    case DataType::kBf16:
      return {0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x7f7f, 0xff7f, 0x7f80, 0xff80,
              0x7f81, 0x7fc1, 0xffc0, 0xffff, 0x3f80, 0xbf80, 0x3b80, 0x7b00, 0x7b80};
    case DataType::kI32: return {0, 1, 0xffffffff, 0x80000000, 0x7fffffff, 0xfffffff9};
    case DataType::kI64:
      return {0, 1, 0xffffffffffffffff, 0x8000000000000000, 0x7fffffffffffffff, 7};
    case DataType::kU8: return {0, 1, 0xff, 0x80, 0x7f};
  }
  return {};
}

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}

  std::size_t below(std::size_t limit) { return engine_() % limit; }

  // A third special, a third any bits, a third ordinary numbers.
  void fill(DataType type, std::uint8_t* data, std::size_t count) {
    const std::vector<std::uint64_t> special = special_patterns(type);
    for (std::size_t i = 0; i < count; ++i, data += size_of(type)) {
      std::uint64_t bits = engine_();
      const std::size_t kind = below(3);
      if (kind == 0) bits = special[below(special.size())];
      std::memcpy(data, &bits, size_of(type));
      if (kind == 2) {
        reference::with_type(type, [&](auto load, auto store) {
          using T = decltype(load(data));
          store(data, static_cast<T>(static_cast<T>(below(200)) / T{3}));
        });
      }
    }
  }

 private:
  std::mt19937_64 engine_;
};

// Elements at a chosen distance from alignment, with bytes around them that nobody may touch.
struct Buffer {
  Buffer(std::size_t bytes, std::size_t shift) : storage(bytes + 256, 0xa5), offset(64 + shift) {}
  Buffer(const Buffer&) = default;

  std::uint8_t* data() { return storage.data() + offset; }

  Bytes storage;
  std::size_t offset;
};

void expect_same(DataType type, Buffer& actual, Buffer& expected, std::size_t count) {
  if (actual.storage == expected.storage) return;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = i * size_of(type);
    ASSERT_EQ(Bytes(actual.data() + at, actual.data() + at + size_of(type)),
              Bytes(expected.data() + at, expected.data() + at + size_of(type)))
        << "element " << i;
  }
  FAIL() << "written outside of the range";
}

std::vector<std::size_t> lengths() {
  std::vector<std::size_t> all;
  for (std::size_t n = 0; n <= 70; ++n) all.push_back(n);
  for (const std::size_t n : {127, 128, 129, 255, 257, 511, 513, 1000, 1025, 5003}) {
    all.push_back(n);
  }
  return all;
}

// Runs the body for every variant this machine can run, every type and every operation.
template <typename Body>
void for_all_kernels(Body body) {
  for (const KernelTable* kernels : supported_kernels()) {
    for (const DataType type : kTypes) {
      for (const ReduceOp op : kOps) {
        SCOPED_TRACE(fmt::format("{} {} {}", kernels->name, to_string(type), to_string(op)));
        ASSERT_NO_FATAL_FAILURE(body(*kernels, type, op));
      }
    }
  }
}

TEST(Kernels, GenericIsAlwaysThereAndComesLast) {
  ASSERT_FALSE(supported_kernels().empty());
  EXPECT_STREQ(supported_kernels().back()->name, "generic");
}

TEST(Kernels, CombineMatchesTheReference) {
  for_all_kernels([](const KernelTable& kernels, DataType type, ReduceOp op) {
    Random random(1);
    const std::size_t size = size_of(type);
    for (const std::size_t count : lengths()) {
      for (const int dst_is : {0, 1, 2}) {  // neither, lhs, rhs
        Buffer lhs(count * size, random.below(64));
        Buffer rhs(count * size, random.below(64));
        Buffer dst(count * size, random.below(64));
        random.fill(type, lhs.data(), count);
        random.fill(type, rhs.data(), count);
        Buffer& out = dst_is == 0 ? dst : dst_is == 1 ? lhs : rhs;
        Buffer expected = out;
        for (std::size_t i = 0; i < count * size; i += size) {
          reference::combine(op, type, expected.data() + i, lhs.data() + i, rhs.data() + i);
        }
        kernels.combine(op, type, out.data(), lhs.data(), rhs.data(), count);
        ASSERT_NO_FATAL_FAILURE(expect_same(type, out, expected, count)) << "of " << count;
      }
    }
  });
}

TEST(Kernels, EverySixteenBitValueSurvives) {
  constexpr std::size_t kCount = 1 << 16;
  for (const DataType type : {DataType::kF16, DataType::kBf16}) {
    std::vector<std::uint16_t> values(kCount);
    std::vector<std::uint16_t> expected(kCount);
    for (std::size_t i = 0; i < kCount; ++i) {
      const auto bits = static_cast<std::uint16_t>(i);
      const bool f16 = type == DataType::kF16;
      const bool nan = (bits & 0x7fff) > (f16 ? 0x7c00 : 0x7f80);
      values[i] = bits;
      expected[i] = nan ? (f16 ? reference::kF16Nan : reference::kBf16Nan) : bits;
    }
    for (const KernelTable* kernels : supported_kernels()) {
      std::vector<std::uint16_t> result(kCount);
      kernels->combine(ReduceOp::kMax, type, result.data(), values.data(), values.data(), kCount);
      EXPECT_EQ(result, expected) << kernels->name;
      result = values;
      kernels->finish_mean(type, result.data(), kCount, 1);
      EXPECT_EQ(result, expected) << kernels->name;
    }
  }
}

TEST(Kernels, AnyNanGivesTheCanonicalNan) {
  const auto quiet = std::bit_cast<float>(0xffc12345U);
  const auto signalling = std::bit_cast<float>(0x7f812345U);
  for (const KernelTable* kernels : supported_kernels()) {
    for (const ReduceOp op : kOps) {
      for (const auto& [a, b] : {std::pair{quiet, 1.0F},
                                 {1.0F, quiet},
                                 {signalling, quiet},
                                 {quiet, signalling},
                                 {signalling, 2.0F}}) {
        const std::vector<float> lhs(40, a);
        const std::vector<float> rhs(40, b);
        std::vector<float> dst(40);
        kernels->combine(op, DataType::kF32, dst.data(), lhs.data(), rhs.data(), dst.size());
        for (const float value : dst) {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(value), 0x7fc00000U) << kernels->name;
        }
      }
    }
  }
}

TEST(Kernels, ZerosAreOrderedBySign) {
  for (const KernelTable* kernels : supported_kernels()) {
    for (const auto& [a, b] : {std::pair{-0.0, 0.0}, {0.0, -0.0}}) {
      double min = 1;
      double max = 1;
      kernels->combine(ReduceOp::kMin, DataType::kF64, &min, &a, &b, 1);
      kernels->combine(ReduceOp::kMax, DataType::kF64, &max, &a, &b, 1);
      EXPECT_TRUE(std::signbit(min));
      EXPECT_FALSE(std::signbit(max));
    }
  }
}

TEST(Kernels, FinishMeanMatchesTheReference) {
  for (const KernelTable* kernels : supported_kernels()) {
    for (const DataType type : kTypes) {
      Random random(2);
      for (const std::size_t count : lengths()) {
        for (const int n : {1, 2, 3, 7, 300}) {
          SCOPED_TRACE(fmt::format("{} {} {}/{}", kernels->name, to_string(type), count, n));
          Buffer data(count * size_of(type), random.below(64));
          random.fill(type, data.data(), count);
          Buffer expected = data;
          for (std::size_t i = 0; i < count; ++i) {
            reference::finish_mean(type, expected.data() + i * size_of(type), n);
          }
          kernels->finish_mean(type, data.data(), count, n);
          ASSERT_NO_FATAL_FAILURE(expect_same(type, data, expected, count));
        }
      }
    }
  }
}

TEST(Kernels, IntegerMeanFloors) {
  std::vector<std::int32_t> values{-7, -6, -1, 0, 1, 5, 6, 7};
  finish_mean(DataType::kI32, values.data(), values.size(), 3);
  EXPECT_EQ(values, (std::vector<std::int32_t>{-3, -2, -1, 0, 0, 1, 2, 2}));
}

TEST(Kernels, FindsTheFirstNonFinite) {
  const std::pair<DataType, std::vector<std::uint64_t>> bad[] = {
      {DataType::kF32, {0x7f800000, 0xff800000, 0x7fc00000, 0xff800001}},
      {DataType::kF64, {0x7ff0000000000000, 0xfff0000000000000, 0x7ff0000000000001}},
      {DataType::kF16, {0x7c00, 0xfc00, 0x7e00, 0xfc01}},
      {DataType::kBf16, {0x7f80, 0xff80, 0x7fc0, 0xff81}}};
  for (const KernelTable* kernels : supported_kernels()) {
    for (const auto& [type, patterns] : bad) {
      SCOPED_TRACE(fmt::format("{} {}", kernels->name, to_string(type)));
      const std::size_t size = size_of(type);
      for (const std::size_t count : lengths()) {
        // The largest finite value everywhere; then a bad one after the end, and in one or two
        // places.
        const std::uint64_t largest = patterns[0] - 1;
        Buffer data((count + 1) * size, count % 64);
        for (std::size_t i = 0; i < count; ++i) std::memcpy(data.data() + i * size, &largest, size);
        std::memcpy(data.data() + count * size, &patterns[0], size);
        ASSERT_EQ(kernels->find_non_finite(type, data.data(), count), count);
        for (std::size_t at = count; at-- > (count > 6 ? count - 6 : 0);) {
          std::memcpy(data.data() + at * size, &patterns[at % patterns.size()], size);
          ASSERT_EQ(kernels->find_non_finite(type, data.data(), count), at);
        }
        if (count == 0) continue;
        std::memcpy(data.data(), &patterns.back(), size);
        ASSERT_EQ(kernels->find_non_finite(type, data.data(), count), 0U);
      }
    }
  }
}

TEST(Kernels, IntegersAreFinite) {
  const Bytes ones(64, 0xff);
  for (const DataType type : {DataType::kI32, DataType::kI64, DataType::kU8}) {
    EXPECT_EQ(find_non_finite(type, ones.data(), 8), 8U);
  }
}

// Evaluates the program one element at a time.
void reduce_by_reference(const TreeReduction& reduction, std::vector<Buffer>& inputs,
                         std::uint8_t* out, std::size_t element) {
  const std::size_t size = size_of(reduction.type);
  std::array<std::uint64_t, 64> stack;
  std::size_t height = 0;
  std::size_t next = 0;
  for (const CombineStep step : reduction.program) {
    if (step.push) {
      std::memcpy(&stack[height++], inputs[next++].data() + element * size, size);
    } else {
      --height;
      std::uint64_t& left = stack[height - 1];
      reference::combine(reduction.op, reduction.type, &left, &left, &stack[height]);
    }
  }
  if (reduction.op == ReduceOp::kMean) {
    reference::finish_mean(reduction.type, &stack[0], reduction.mean_of);
  }
  std::memcpy(out, &stack[0], size);
}

// `is_input[o]` says which input output o is, or -1 for a buffer of its own.
void check_reduce_tree(const KernelTable& kernels, const TreeReduction& reduction,
                       std::size_t input_count, const std::vector<int>& is_input, std::size_t count,
                       Random& random) {
  const std::size_t bytes = count * size_of(reduction.type);
  std::vector<Buffer> inputs;
  std::vector<Buffer> own;
  std::vector<const void*> input_pointers;
  std::vector<void*> outputs;
  for (std::size_t i = 0; i < input_count; ++i) {
    inputs.emplace_back(bytes, random.below(64));
    random.fill(reduction.type, inputs[i].data(), count);
  }
  for (std::size_t o = 0; o < is_input.size(); ++o) own.emplace_back(bytes, random.below(64));
  Bytes expected(bytes);
  for (std::size_t i = 0; i < count; ++i) {
    reduce_by_reference(reduction, inputs, expected.data() + i * size_of(reduction.type), i);
  }
  std::vector<Buffer> untouched = inputs;
  for (Buffer& input : inputs) input_pointers.push_back(input.data());
  for (std::size_t o = 0; o < is_input.size(); ++o) {
    outputs.push_back(is_input[o] >= 0 ? inputs[is_input[o]].data() : own[o].data());
    if (is_input[o] >= 0) {
      std::copy(expected.begin(), expected.end(), untouched[is_input[o]].data());
    }
  }
  reduce_tree(kernels, reduction, input_pointers, outputs, count);
  for (std::size_t i = 0; i < input_count; ++i) {
    ASSERT_NO_FATAL_FAILURE(expect_same(reduction.type, inputs[i], untouched[i], count));
  }
  for (std::size_t o = 0; o < is_input.size(); ++o) {
    Buffer filled(bytes, own[o].offset - 64);
    if (is_input[o] < 0) std::copy(expected.begin(), expected.end(), filled.data());
    ASSERT_NO_FATAL_FAILURE(expect_same(reduction.type, own[o], filled, count));
  }
}

std::vector<CombineStep> program_over(std::size_t leaves) {
  std::vector<Range> nodes;
  for (std::size_t leaf = 0; leaf < leaves; ++leaf) nodes.push_back({leaf, leaf + 1});
  return combine_program(nodes, leaves);
}

TEST(Kernels, ReduceTreeMatchesTheReferenceWhateverTheOutputsAre) {
  for_all_kernels([](const KernelTable& kernels, DataType type, ReduceOp op) {
    Random random(3);
    for (const std::uint32_t leaves : {1U, 2U, 3U, 4U, 5U, 8U}) {
      const std::vector<CombineStep> program = program_over(leaves);
      const TreeReduction reduction{op, type, program, static_cast<int>(leaves)};
      const int last = static_cast<int>(leaves) - 1;
      std::vector<int> all_inputs(leaves);
      for (int i = 0; i <= last; ++i) all_inputs[i] = last - i;
      for (const std::vector<int>& outputs :
           {std::vector<int>{-1}, {0}, {last}, {last, -1, -1}, all_inputs}) {
        for (const std::size_t count : {0, 1, 17, 130, 1500}) {
          SCOPED_TRACE(fmt::format("{} leaves, {} outputs, {}", leaves, outputs.size(), count));
          ASSERT_NO_FATAL_FAILURE(
              check_reduce_tree(kernels, reduction, leaves, outputs, count, random));
        }
      }
    }
  });
}

TEST(Kernels, ReduceTreeServesTheDeepestStack) {
  // Right-leaning: all values are pushed before the first is combined.
  std::vector<CombineStep> program(33, {.push = true});
  program.resize(65);
  ASSERT_EQ(stack_depth(program), 33U);
  Random random(4);
  for (const KernelTable* kernels : supported_kernels()) {
    check_reduce_tree(*kernels, {ReduceOp::kSum, DataType::kF32, program, 1}, 33, {0, 32}, 3000,
                      random);
  }
}

TEST(Kernels, ThePublicFunctionsUseTheBestVariant) {
  std::vector<float> a{1, 2, 3};
  std::vector<float> b{10, 20, 30};
  combine(ReduceOp::kSum, DataType::kF32, a.data(), a.data(), b.data(), a.size());
  EXPECT_EQ(a, (std::vector<float>{11, 22, 33}));
  const std::vector<CombineStep> program = program_over(2);
  const std::vector<const void*> inputs{a.data(), b.data()};
  const std::vector<void*> outputs{b.data()};
  reduce_tree({ReduceOp::kMean, DataType::kF32, program, 2}, inputs, outputs, a.size());
  EXPECT_EQ(b, (std::vector<float>{10.5, 21, 31.5}));
  EXPECT_EQ(find_non_finite(DataType::kF32, b.data(), b.size()), b.size());
}

TEST(KernelsDeathTest, AProgramThatDoesNotFitItsInputsIsABug) {
  const std::vector<CombineStep> program = program_over(3);
  float value = 0;
  const std::vector<const void*> inputs{&value, &value};
  const std::vector<void*> outputs{&value};
  EXPECT_DEATH(reduce_tree({ReduceOp::kSum, DataType::kF32, program, 1}, inputs, outputs, 1),
               "check failed");
}

}  // namespace
}  // namespace lockstep::kernels_test
