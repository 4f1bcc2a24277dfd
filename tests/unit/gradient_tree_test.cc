#include "lockstep/train/gradient_tree.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "lockstep/base/random.h"
#include "lockstep/comm/kernels/kernels.h"

namespace lockstep::gradient_tree_test {
namespace {

// The definition of T, with the cut found by counting up.
std::string expression(std::size_t begin, std::size_t end) {
  if (end - begin == 1) return std::to_string(begin);
  std::size_t p = 1;
  while (2 * p < end - begin) p *= 2;
  return fmt::format("({}+{})", expression(begin, begin + p), expression(begin + p, end));
}

// Runs a schedule on expressions.
std::vector<std::string> evaluate(const LaneSchedule& schedule) {
  std::vector<std::string> accumulators(schedule.accumulators);
  for (const LaneWork& work : schedule.lanes) {
    accumulators[work.accumulator] = std::to_string(work.lane);
    for (const AccumulatorMerge merge : work.merges) {
      accumulators[merge.into] =
          fmt::format("({}+{})", accumulators[merge.into], accumulators[merge.from]);
    }
  }
  accumulators.resize(schedule.partials.size());
  return accumulators;
}

TEST(LaneSchedule, AddsInTheCanonicalTreeWithFewAccumulators) {
  for (std::uint32_t lanes = 1; lanes <= 40; ++lanes) {
    for (int workers = 1; workers <= static_cast<int>(lanes) && workers <= 9; ++workers) {
      const LeafOwners owners = even_owners(lanes, workers);
      for (int rank = 0; rank < workers; ++rank) {
        const auto nodes = owned_nodes(owners, rank);
        const LaneSchedule schedule = schedule_lanes(nodes);
        const auto partials = evaluate(schedule);
        ASSERT_EQ(partials.size(), nodes.size());
        for (std::size_t i = 0; i < nodes.size(); ++i) {
          EXPECT_EQ(partials[i], expression(nodes[i].begin, nodes[i].end));
        }
        // Every lane comes once, in order within a partial; its place counts in lane order. Open at
        // a time are floor(log2(n)) + 1, and the partials.
        std::vector<std::size_t> lane_at(schedule.lanes.size());
        for (const LaneWork& work : schedule.lanes) lane_at.at(work.place) = work.lane;
        std::vector<std::size_t> all(schedule.lanes.size());
        std::iota(all.begin(), all.end(), nodes[0].begin);
        EXPECT_EQ(lane_at, all);
        EXPECT_EQ(all.back() + 1, nodes.back().end);
        EXPECT_EQ(schedule.accumulators, accumulators_for(nodes));
        const auto n = static_cast<std::uint32_t>(schedule.lanes.size());
        EXPECT_LE(schedule.accumulators,
                  nodes.size() - 1 + static_cast<std::size_t>(std::bit_width(n)));
        if (workers == 1) {
          EXPECT_EQ(schedule.accumulators, static_cast<std::uint32_t>(std::bit_width(n)));
        }
      }
    }
  }
}

// The largest partial first: while it is added up, no other one takes an accumulator.
TEST(LaneSchedule, LargePartialsComeFirst) {
  const std::vector<Range> ascending = {{3, 4}, {4, 8}, {8, 16}};
  const LaneSchedule schedule = schedule_lanes(ascending);
  EXPECT_EQ(schedule.accumulators, 4u);
  EXPECT_EQ(schedule.lanes.front().lane, 8u);
  EXPECT_EQ(schedule.lanes.front().place, 5u);
  EXPECT_EQ(schedule.lanes.back().lane, 3u);
  EXPECT_EQ(schedule.lanes.back().place, 0u);
  EXPECT_EQ(evaluate(schedule)[2], expression(8, 16));
}

constexpr std::size_t kSize = 100'003;  // several pieces, and an odd end

float lane_value(std::uint32_t lane, std::size_t i) {
  return (random_f32(1, lane, i) - 0.5f) * std::ldexp(1.0f, static_cast<int>(lane % 7) * 5 - 15);
}

// Every worker's partials, combined along the tree.
std::vector<float> sum_over_workers(std::uint32_t lanes, int workers, ThreadPool& pool,
                                    std::size_t cut) {
  const LeafOwners owners = even_owners(lanes, workers);
  std::vector<GradientTree> trees;
  std::vector<const void*> inputs;
  trees.reserve(static_cast<std::size_t>(workers));
  for (int rank = 0; rank < workers; ++rank) {
    GradientTree& tree =
        trees.emplace_back(schedule_lanes(owned_nodes(owners, rank)), kSize, Buffer::heap, pool);
    for (std::size_t i = 0; i < tree.schedule().lanes.size(); ++i) {
      const std::span<float> gradient = tree.lane_gradient(i);
      for (std::size_t begin = 0; begin < kSize; begin += cut) {
        const std::size_t end = std::min(begin + cut, kSize);
        for (std::size_t e = begin; e < end; ++e)
          gradient[e] = lane_value(tree.schedule().lanes[i].lane, e);
        tree.ready(i, {begin, end});
      }
    }
    for (std::size_t i = 0; i < tree.schedule().partials.size(); ++i)
      inputs.push_back(tree.partial(i).data());
  }
  const auto program = combine_program(maximal_nodes(owners), lanes);
  std::vector<float> sum(kSize);
  void* output = sum.data();
  reduce_tree({ReduceOp::kSum, DataType::kF32, program}, inputs, std::span(&output, 1), kSize);
  return sum;
}

bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

// Who computes a lane, on how many threads and in what pieces does not change a bit.
TEST(GradientTree, SameBitsForAnyWorkersThreadsAndPieces) {
  ThreadPool one(1), two(2);
  const std::vector<float> alone = sum_over_workers(11, 1, one, kSize);
  for (const int workers : {1, 2, 3, 4, 8, 11}) {
    EXPECT_TRUE(same_bits(sum_over_workers(11, workers, two, 7777), alone)) << workers;
  }
  // The values are such that another order would show.
  std::vector<float> in_turn(kSize);
  for (std::uint32_t lane = 0; lane < 11; ++lane) {
    for (std::size_t i = 0; i < kSize; ++i) in_turn[i] += lane_value(lane, i);
  }
  EXPECT_FALSE(same_bits(in_turn, alone));
}

}  // namespace
}  // namespace lockstep::gradient_tree_test
