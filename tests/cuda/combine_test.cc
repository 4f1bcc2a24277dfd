#include "lockstep/comm/nccl/combine.h"

#include <gtest/gtest.h>

#include "gpu_cases.h"
#include "reducer_cases.h"

namespace lockstep {
namespace {

// Inputs on the device, `shift` floats from an aligned place.
struct Rows {
  Rows(const std::vector<std::vector<float>>& values, std::size_t shift) {
    for (const auto& row : values) {
      arrays.emplace_back(row.size() + shift, "a test");
      data.push_back(arrays.back().data() + shift);
      upload(row, arrays.back().data() + shift);
    }
  }
  std::vector<DeviceArray<float>> arrays;
  std::vector<const float*> data;
};

// Leaf i belongs to rank i, so that every leaf is an input.
std::vector<CombineStep> program_of(std::uint32_t leaves) {
  return combine_program(maximal_nodes(even_owners(leaves, static_cast<int>(leaves))), leaves);
}

// Numbers whose sum depends on the order.
std::vector<std::vector<float>> leaves_of(std::size_t leaves, std::size_t count) {
  std::vector<std::vector<float>> values;
  for (std::size_t leaf = 0; leaf < leaves; ++leaf) values.push_back(wild_numbers(count, leaf));
  return values;
}

TEST(CudaCombine, AddsAlongTheTreeForAnyNumberOfInputs) {
  LOCKSTEP_NEEDS_GPU();
  for (const std::uint32_t leaves : {1U, 2U, 3U, 4U, 5U, 8U, 17U, 31U, 64U, 100U, 129U, 300U, 700U,
                                     static_cast<unsigned>(cuda::kMostInputs)}) {
    const std::size_t count = 1003;
    const auto values = leaves_of(leaves, count);
    const Rows rows(values, 0);
    const DeviceArray<float> out(count, "a test");
    cuda::combine(program_of(leaves), rows.data, out.data(), count, nullptr);
    EXPECT_EQ(bits(download(out.data(), count)), bits(tree_of(values))) << leaves;
    if (leaves >= 4) {  // else the tree is a chain
      EXPECT_NE(bits(chain_of(values)), bits(tree_of(values))) << "the numbers are too tame";
    }
  }
}

TEST(CudaCombine, HasTheSameBitsAtAnyAlignmentAndLengthAndInPlace) {
  LOCKSTEP_NEEDS_GPU();
  for (const std::size_t count : {1, 2, 3, 4, 5, 7, 8, 1021, 4096}) {
    for (const std::uint32_t leaves : {2U, 5U, 11U}) {
      const auto values = leaves_of(leaves, count);
      const auto expected = bits(tree_of(values));
      for (const std::size_t shift : {0, 1, 2, 3}) {
        for (const std::uint32_t into : {0U, leaves - 1, leaves}) {  // the last: no input
          const Rows rows(values, shift);
          // More on either side, to see what is written beyond.
          const DeviceArray<float> other(count + 8, "a test");
          upload(std::vector<float>(count + 8, 7.0F), other.data());
          float* out = into < leaves ? rows.arrays[into].data() + shift : other.data() + 4;
          cuda::combine(program_of(leaves), rows.data, out, count, nullptr);
          EXPECT_EQ(bits(download(out, count)), expected) << count << " " << leaves << " " << shift;
          for (std::uint32_t leaf = 0; leaf < leaves; ++leaf) {
            if (leaf == into) continue;
            EXPECT_EQ(bits(download(rows.data[leaf], count)), bits(values[leaf]));
          }
          if (into < leaves) continue;
          const auto around = download(other.data(), count + 8);
          EXPECT_EQ(around[3], 7.0F);
          EXPECT_EQ(around[count + 4], 7.0F);
        }
      }
    }
  }
}

// T(0, n) as nodes of many sizes: the stack is deeper than the number of inputs suggests.
TEST(CudaCombine, ReachesEveryDepthOfTheStack) {
  LOCKSTEP_NEEDS_GPU();
  for (const std::uint32_t levels : {1U, 3U, 4U, 7U, 8U, 15U, 16U, 20U}) {
    // Only the last two leaves are apart, so all left siblings on the way to them wait.
    LeafOwners owners(std::size_t{1} << levels);
    for (std::size_t i = 0; i < owners.size(); ++i) {
      owners[i] = static_cast<int>(std::bit_width(owners.size() - 1 - i));
    }
    const auto nodes = maximal_nodes(owners);
    const auto leaves = static_cast<std::uint32_t>(owners.size());
    const auto program = combine_program(nodes, leaves);
    ASSERT_EQ(stack_depth(program), levels + 1);
    const auto values = leaves_of(nodes.size(), 50);
    std::vector<float> expected = values.back();  // from the right: each is a left sibling
    for (std::size_t i = values.size() - 1; i-- > 0;) expected = added(values[i], expected);
    const Rows rows(values, 0);
    const DeviceArray<float> out(50, "a test");
    cuda::combine(program, rows.data, out.data(), 50, nullptr);
    EXPECT_EQ(bits(download(out.data(), 50)), bits(expected)) << levels;
  }
}

TEST(CudaCombine, TreatsSpecialNumbersAsTheCpuDoes) {
  LOCKSTEP_NEEDS_GPU();
  const float infinity = std::numeric_limits<float>::infinity();
  const float tiny = std::numeric_limits<float>::denorm_min();
  std::vector<float> special{0.0F, -0.0F, infinity, -infinity, tiny, -tiny, 1e-39F, 3.4e38F};
  special.push_back(std::bit_cast<float>(0xffc12345U));  // NaN
  special.push_back(std::bit_cast<float>(0x7fffffffU));  // and another
  std::vector<float> left;
  std::vector<float> right;
  for (const float a : special) {
    for (const float b : special) {
      left.push_back(a);
      right.push_back(b);
    }
  }
  const std::vector<const void*> inputs{left.data(), right.data()};
  std::vector<float> expected(left.size());
  void* const expected_at = expected.data();
  reduce_tree({ReduceOp::kSum, DataType::kF32, program_of(2), 2}, inputs, {&expected_at, 1},
              expected.size());
  const Rows rows({left, right}, 0);
  const DeviceArray<float> out(left.size(), "a test");
  cuda::combine(program_of(2), rows.data, out.data(), left.size(), nullptr);
  EXPECT_EQ(bits(download(out.data(), left.size())), bits(expected));
}

}  // namespace
}  // namespace lockstep
