#include "lockstep/base/canonical_tree.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

namespace lockstep::canonical_tree_test {
namespace {

using ::testing::ElementsAre;

// The definition once more, with the cut found by counting up.
std::size_t cut(std::size_t leaves) {
  std::size_t p = 1;
  while (2 * p < leaves) p *= 2;
  return p;
}

std::string expression(std::size_t begin, std::size_t end) {
  if (end - begin == 1) return std::to_string(begin);
  const std::size_t middle = begin + cut(end - begin);
  return fmt::format("({}+{})", expression(begin, middle), expression(middle, end));
}

void all_nodes(Range node, std::vector<Range>& nodes) {
  nodes.push_back(node);
  if (node.end - node.begin == 1) return;
  const std::size_t middle = node.begin + cut(node.end - node.begin);
  all_nodes({node.begin, middle}, nodes);
  all_nodes({middle, node.end}, nodes);
}

// Runs the program on the expressions of the nodes.
std::string evaluate(std::span<const Range> nodes, std::size_t leaves) {
  std::vector<std::string> stack;
  std::size_t next = 0;
  std::size_t deepest = 0;
  const std::vector<CombineStep> program = combine_program(nodes, leaves);
  for (const CombineStep step : program) {
    if (step.push) {
      const Range node = nodes[next++];
      stack.push_back(expression(node.begin, node.end));
    } else {
      const std::string right = stack.back();
      stack.pop_back();
      stack.back() = fmt::format("({}+{})", stack.back(), right);
    }
    deepest = std::max(deepest, stack.size());
  }
  EXPECT_EQ(next, nodes.size());
  EXPECT_EQ(stack.size(), 1U);
  EXPECT_EQ(stack_depth(program), deepest);
  return stack.back();
}

std::vector<LeafOwners> some_owners(std::size_t leaves) {
  std::mt19937 random(leaves);
  std::vector<LeafOwners> cases;
  for (int world_size = 1; world_size <= 9; ++world_size) {
    cases.push_back(even_owners(leaves, world_size));
    LeafOwners scattered(leaves);
    for (int& owner : scattered) {
      owner = std::uniform_int_distribution<int>(0, world_size - 1)(random);
    }
    cases.push_back(scattered);
    std::sort(scattered.begin(), scattered.end());
    cases.push_back(scattered);
  }
  return cases;
}

TEST(CanonicalTree, SplitsAtTheLargestPowerOfTwoStrictlyBelow) {
  for (std::size_t leaves = 2; leaves <= 64; ++leaves) {
    EXPECT_EQ(tree_split(leaves), cut(leaves)) << leaves;
  }
  EXPECT_EQ(tree_split(0xffffffffU), 0x80000000U);
}

TEST(CanonicalTree, ProgramOfLeavesIsTheRecursion) {
  for (std::size_t leaves = 1; leaves <= 64; ++leaves) {
    std::vector<Range> nodes;
    for (std::size_t leaf = 0; leaf < leaves; ++leaf) nodes.push_back({leaf, leaf + 1});
    EXPECT_EQ(evaluate(nodes, leaves), expression(0, leaves));
  }
  const std::vector<Range> three{{0, 1}, {1, 2}, {2, 3}};
  EXPECT_EQ(evaluate(three, 3), "((0+1)+2)");
}

TEST(CanonicalTree, MaximalNodesAreTheLargestOfOneOwner) {
  for (std::size_t leaves = 1; leaves <= 64; ++leaves) {
    std::vector<Range> real;
    all_nodes({0, leaves}, real);
    for (const LeafOwners& owners : some_owners(leaves)) {
      const auto one_owner = [&](Range node) {
        return std::all_of(owners.begin() + node.begin, owners.begin() + node.end,
                           [&](int owner) { return owner == owners[node.begin]; });
      };
      const std::vector<Range> nodes = maximal_nodes(owners);
      std::size_t next_leaf = 0;
      for (const Range node : nodes) {
        EXPECT_EQ(node.begin, next_leaf);
        next_leaf = node.end;
        EXPECT_TRUE(one_owner(node));
        ASSERT_NE(std::find(real.begin(), real.end(), node), real.end());
        for (const Range& above : real) {
          const bool contains = above.begin <= node.begin && node.end <= above.end;
          EXPECT_FALSE(contains && above != node && one_owner(above));
        }
      }
      EXPECT_EQ(next_leaf, leaves);
      EXPECT_EQ(evaluate(nodes, leaves), expression(0, leaves));
    }
  }
}

TEST(CanonicalTree, OwnedNodesOfAllRanksAreTheMaximalNodes) {
  for (const LeafOwners& owners : some_owners(37)) {
    std::vector<Range> together;
    for (int rank = 0; rank < 9; ++rank) {
      for (const Range node : owned_nodes(owners, rank)) {
        EXPECT_EQ(owners[node.begin], rank);
        together.push_back(node);
      }
    }
    std::sort(together.begin(), together.end(), [](Range a, Range b) { return a.begin < b.begin; });
    EXPECT_EQ(together, maximal_nodes(owners));
  }
}

TEST(CanonicalTree, EvenOwnersAreContiguousRuns) {
  EXPECT_THAT(even_owners(7, 3), ElementsAre(0, 0, 1, 1, 2, 2, 2));
  EXPECT_THAT(even_owners(4, 4), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(even_owners(2, 4), ElementsAre(1, 3));
  EXPECT_TRUE(even_owners(0, 3).empty());
  EXPECT_THAT(maximal_nodes(even_owners(8, 3)),
              ElementsAre(Range{0, 2}, Range{2, 4}, Range{4, 5}, Range{5, 6}, Range{6, 8}));
}

TEST(CanonicalTree, NoLeavesNeedNoProgram) {
  EXPECT_TRUE(maximal_nodes({}).empty());
  EXPECT_TRUE(combine_program({}, 0).empty());
  EXPECT_EQ(stack_depth({}), 0U);
}

TEST(CanonicalTreeDeathTest, NodesThatDoNotCoverTheTreeAreABug) {
  const std::vector<Range> hole{{0, 2}, {3, 4}};
  EXPECT_DEATH(combine_program(hole, 4), "check failed");
  const std::vector<Range> not_a_node{{0, 1}, {1, 3}};
  EXPECT_DEATH(combine_program(not_a_node, 3), "check failed");
}

}  // namespace
}  // namespace lockstep::canonical_tree_test
