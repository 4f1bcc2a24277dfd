#include "lockstep/comm/collectives/plan.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <random>

#include "tests/support/plan_simulator.h"
#include "tests/support/printing.h"

namespace lockstep::plan_test {
namespace {

using Buffers = std::vector<std::vector<Symbols::Value>>;

Buffers full_buffers(int world_size, std::size_t count) {
  Buffers buffers(static_cast<std::size_t>(world_size));
  for (std::size_t r = 0; r < buffers.size(); ++r) {
    for (std::size_t i = 0; i < count; ++i) buffers[r].push_back(Symbols::leaf(r, i));
  }
  return buffers;
}

template <typename MakePlan>
std::vector<Plan> plans_of(int world_size, MakePlan make_plan) {
  std::vector<Plan> plans;
  for (int rank = 0; rank < world_size; ++rank) plans.push_back(make_plan(rank));
  return plans;
}

// Runs both with rendezvous and with messages that are always taken, and hands every rank's
// buffer to `check(rank, buffer)`.
template <typename Check>
void simulate(const std::vector<Plan>& plans, const Buffers& buffers, Symbols& symbols,
              Check check) {
  const auto combine = [&](Symbols::Value a, Symbols::Value b) { return symbols.combine(a, b); };
  for (const bool rendezvous : {true, false}) {
    Simulator simulator(plans, buffers, combine, rendezvous, rendezvous ? 1 : 2);
    ASSERT_NO_FATAL_FAILURE(simulator.run());
    for (std::size_t r = 0; r < plans.size(); ++r) {
      ASSERT_NO_FATAL_FAILURE(check(r, simulator.buffer(r))) << "on rank " << r;
    }
  }
}

std::vector<int> world_sizes() {
  std::vector<int> sizes(17);
  std::iota(sizes.begin(), sizes.end(), 1);
  sizes.push_back(32);
  return sizes;
}

std::vector<std::size_t> counts(int world_size) {
  const auto n = static_cast<std::size_t>(world_size);
  return {0, 1, 2, n - 1, n, n + 1, 7, 1000};
}

// Uneven pieces with an empty one among them and a hole between them.
std::vector<Range> uneven_pieces(int world_size) {
  std::vector<Range> pieces;
  std::size_t begin = 3;
  for (int r = 0; r < world_size; ++r) {
    const auto count = static_cast<std::size_t>((r * 5 + 2) % 7);
    pieces.push_back({begin, begin + count});
    begin += count + static_cast<std::size_t>(r % 2);
  }
  return pieces;
}

std::size_t end_of(const std::vector<Range>& pieces) { return pieces.back().end + 2; }

std::size_t traffic(const Plan& plan) {
  std::size_t elements = 0;
  for (const Round& round : plan.rounds) {
    for (const Send& send : round.sends) elements += send.range.size();
  }
  return elements;
}

constexpr Algorithm kExact[] = {Algorithm::kPair, Algorithm::kHalvingDoubling, Algorithm::kDirect,
                                Algorithm::kTree};
constexpr Algorithm kAll[] = {Algorithm::kPair, Algorithm::kHalvingDoubling, Algorithm::kDirect,
                              Algorithm::kTree, Algorithm::kRing};

TEST(Plan, ChunksAreEvenAndAdjacent) {
  for (const int parts : world_sizes()) {
    for (const std::size_t count : counts(parts)) {
      std::size_t next = 0;
      for (int i = 0; i < parts; ++i) {
        const Range chunk = chunk_of(count, parts, i);
        EXPECT_EQ(chunk.begin, next);
        const auto size = count / static_cast<std::size_t>(parts);
        const bool larger = static_cast<std::size_t>(i) < count % static_cast<std::size_t>(parts);
        EXPECT_EQ(chunk.size(), larger ? size + 1 : size);
        next += chunk.size();
      }
      EXPECT_EQ(next, count);
    }
  }
}

TEST(Plan, AlgorithmsHaveNames) {
  EXPECT_EQ(to_string(Algorithm::kAuto), "auto");
  EXPECT_EQ(to_string(Algorithm::kHalvingDoubling), "halving-doubling");
  EXPECT_EQ(to_string(Algorithm::kNative), "native");
}

TEST(Plan, AloneThereIsNothingToDo) {
  const std::vector<Range> one{{0, 5}};
  for (const Algorithm algorithm : kAll) {
    EXPECT_TRUE(plan_all_reduce(algorithm, 0, 1, 5).rounds.empty());
  }
  for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kDirect}) {
    EXPECT_TRUE(plan_reduce_scatter(algorithm, 0, one).rounds.empty());
    EXPECT_TRUE(plan_all_gather(algorithm, 0, one).rounds.empty());
  }
  EXPECT_TRUE(plan_broadcast(0, 1, 5, 0).rounds.empty());
  EXPECT_TRUE(plan_reduce(0, 1, 5, 0).rounds.empty());
  EXPECT_TRUE(plan_gather(0, one, 0).rounds.empty());
  EXPECT_TRUE(plan_scatter(0, one, 0).rounds.empty());
}

TEST(Plan, AllReduceGivesTheCanonicalTree) {
  for (const Algorithm algorithm : kExact) {
    for (const int n : world_sizes()) {
      for (const std::size_t count : counts(n)) {
        SCOPED_TRACE(fmt::format("{} n={} count={}", to_string(algorithm), n, count));
        Symbols symbols;
        std::vector<Symbols::Value> expected;
        for (std::size_t i = 0; i < count; ++i) expected.push_back(symbols.canonical(n, i));
        const auto plans =
            plans_of(n, [&](int rank) { return plan_all_reduce(algorithm, rank, n, count); });
        ASSERT_NO_FATAL_FAILURE(
            simulate(plans, full_buffers(n, count), symbols,
                     [&](std::size_t, const auto& buffer) { ASSERT_EQ(buffer, expected); }));
      }
    }
  }
}

TEST(Plan, RingAddsEveryRankOnceAndAllRanksAgree) {
  for (const int n : world_sizes()) {
    for (const std::size_t count : counts(n)) {
      SCOPED_TRACE(fmt::format("n={} count={}", n, count));
      Symbols symbols;
      std::vector<Symbols::Value> agreed;
      const auto plans =
          plans_of(n, [&](int rank) { return plan_all_reduce(Algorithm::kRing, rank, n, count); });
      ASSERT_NO_FATAL_FAILURE(simulate(plans, full_buffers(n, count), symbols,
                                       [&](std::size_t rank, const auto& buffer) {
                                         if (rank == 0) agreed = buffer;
                                         ASSERT_EQ(buffer, agreed);
                                       }));
      ASSERT_EQ(agreed.size(), count);
      for (std::size_t i = 0; i < count; ++i) {
        std::vector<Symbols::Value> leaves;
        symbols.leaves(agreed[i], leaves);
        std::sort(leaves.begin(), leaves.end());
        ASSERT_EQ(leaves.size(), static_cast<std::size_t>(n));
        for (std::size_t r = 0; r < leaves.size(); ++r) ASSERT_EQ(leaves[r], Symbols::leaf(r, i));
      }
    }
  }
}

TEST(Plan, FloatsHaveTheSameBitsWithEveryExactAlgorithm) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 1000);
  constexpr std::size_t kCount = 100;
  const auto add = [](float a, float b) { return a + b; };
  for (const int n : world_sizes()) {
    std::vector<std::vector<float>> buffers(static_cast<std::size_t>(n),
                                            std::vector<float>(kCount));
    for (auto& buffer : buffers)
      std::generate(buffer.begin(), buffer.end(), [&] { return normal(random); });
    std::vector<float> expected;
    for (std::size_t i = 0; i < kCount; ++i) {
      std::vector<float> leaves;
      for (const auto& buffer : buffers) leaves.push_back(buffer[i]);
      expected.push_back(tree_value(leaves, 0, leaves.size(), add));
    }
    for (const Algorithm algorithm : kExact) {
      const auto plans =
          plans_of(n, [&](int rank) { return plan_all_reduce(algorithm, rank, n, kCount); });
      Simulator simulator(plans, buffers, add, true, 3);
      ASSERT_NO_FATAL_FAILURE(simulator.run());
      for (std::size_t r = 0; r < buffers.size(); ++r) {
        ASSERT_EQ(std::memcmp(simulator.buffer(r).data(), expected.data(), kCount * sizeof(float)),
                  0)
            << to_string(algorithm) << " n=" << n;
      }
    }
  }
}

TEST(Plan, EveryRankSendsTheLeastItCan) {
  for (const int n : world_sizes()) {
    const std::size_t count = 32 * static_cast<std::size_t>(n);
    const std::size_t least = 2 * 32 * static_cast<std::size_t>(n - 1);
    for (int rank = 0; rank < n; ++rank) {
      EXPECT_EQ(traffic(plan_all_reduce(Algorithm::kRing, rank, n, count)), least);
      EXPECT_EQ(traffic(plan_all_reduce(Algorithm::kDirect, rank, n, count)), least);
      const auto halving = traffic(plan_all_reduce(Algorithm::kHalvingDoubling, rank, n, count));
      if (std::has_single_bit(static_cast<unsigned>(n))) {
        EXPECT_EQ(halving, least);
      } else {
        EXPECT_LE(halving, 2 * count) << "n=" << n;
      }
    }
  }
}

TEST(Plan, NoRankIsEverybodysFirst) {
  for (const int n : {2, 3, 8, 17}) {
    for (const Algorithm algorithm : {Algorithm::kPair, Algorithm::kDirect}) {
      const auto plans =
          plans_of(n, [&](int rank) { return plan_all_reduce(algorithm, rank, n, 100); });
      for (std::size_t round = 0; round < plans[0].rounds.size(); ++round) {
        for (std::size_t place = 0; place + 1 < static_cast<std::size_t>(n); ++place) {
          for (int rank = 0; rank < n; ++rank) {
            const int to = plans[rank].rounds[round].sends[place].peer;
            EXPECT_EQ(plans[to].rounds[round].recvs[place].peer, rank);
          }
        }
      }
    }
  }
}

TEST(Plan, ReduceScatterLeavesEachPieceWithItsRank) {
  for (const Algorithm algorithm : {Algorithm::kDirect, Algorithm::kRing}) {
    for (const int n : world_sizes()) {
      SCOPED_TRACE(fmt::format("{} n={}", to_string(algorithm), n));
      const std::vector<Range> pieces = uneven_pieces(n);
      Symbols symbols;
      const auto plans =
          plans_of(n, [&](int rank) { return plan_reduce_scatter(algorithm, rank, pieces); });
      ASSERT_NO_FATAL_FAILURE(simulate(plans, full_buffers(n, end_of(pieces)), symbols,
                                       [&](std::size_t r, const auto& buffer) {
                                         for (std::size_t k = 0; k < pieces[r].size(); ++k) {
                                           const std::size_t i = pieces[r].begin + k;
                                           if (algorithm == Algorithm::kDirect) {
                                             ASSERT_EQ(buffer[i], symbols.canonical(n, i));
                                             continue;
                                           }
                                           std::vector<Symbols::Value> leaves;
                                           symbols.leaves(buffer[i], leaves);
                                           std::sort(leaves.begin(), leaves.end());
                                           ASSERT_EQ(leaves.size(), static_cast<std::size_t>(n));
                                           for (std::size_t p = 0; p < leaves.size(); ++p) {
                                             ASSERT_EQ(leaves[p], Symbols::leaf(p, i));
                                           }
                                         }
                                       }));
    }
  }
}

TEST(Plan, AllGatherBringsEveryPieceEverywhere) {
  for (const Algorithm algorithm : {Algorithm::kDirect, Algorithm::kRing}) {
    for (const int n : world_sizes()) {
      SCOPED_TRACE(fmt::format("{} n={}", to_string(algorithm), n));
      const std::vector<Range> pieces = uneven_pieces(n);
      Symbols symbols;
      const auto plans =
          plans_of(n, [&](int rank) { return plan_all_gather(algorithm, rank, pieces); });
      ASSERT_NO_FATAL_FAILURE(simulate(
          plans, full_buffers(n, end_of(pieces)), symbols, [&](std::size_t r, const auto& buffer) {
            std::vector<Symbols::Value> expected;
            for (std::size_t i = 0; i < buffer.size(); ++i) {
              expected.push_back(Symbols::leaf(r, i));
            }
            for (std::size_t p = 0; p < pieces.size(); ++p) {
              for (std::size_t k = 0; k < pieces[p].size(); ++k) {
                expected[pieces[p].begin + k] = Symbols::leaf(p, pieces[p].begin + k);
              }
            }
            ASSERT_EQ(buffer, expected);
          }));
    }
  }
}

TEST(Plan, BroadcastAndReduceReachEveryRoot) {
  constexpr std::size_t kCount = 3;
  for (const int n : world_sizes()) {
    for (int root = 0; root < n; ++root) {
      SCOPED_TRACE(fmt::format("n={} root={}", n, root));
      Symbols symbols;
      const Buffers buffers = full_buffers(n, kCount);
      const auto broadcast =
          plans_of(n, [&](int rank) { return plan_broadcast(rank, n, kCount, root); });
      ASSERT_NO_FATAL_FAILURE(
          simulate(broadcast, buffers, symbols,
                   [&](std::size_t, const auto& buffer) { ASSERT_EQ(buffer, buffers[root]); }));
      const auto reduce = plans_of(n, [&](int rank) { return plan_reduce(rank, n, kCount, root); });
      ASSERT_NO_FATAL_FAILURE(
          simulate(reduce, buffers, symbols, [&](std::size_t r, const auto& buffer) {
            for (std::size_t i = 0; i < kCount && static_cast<int>(r) == root; ++i) {
              ASSERT_EQ(buffer[i], symbols.canonical(n, i));
            }
          }));
    }
  }
}

TEST(Plan, BroadcastTakesLogarithmicTime) {
  for (const int n : world_sizes()) {
    for (int rank = 0; rank < n; ++rank) {
      const auto rounds = static_cast<int>(plan_broadcast(rank, n, 1, 0).rounds.size());
      EXPECT_LE(rounds, std::bit_width(static_cast<unsigned>(n - 1)));
    }
  }
}

TEST(Plan, GatherAndScatterMovePiecesToAndFromTheRoot) {
  for (const int n : world_sizes()) {
    for (const int root : {0, n / 2, n - 1}) {
      SCOPED_TRACE(fmt::format("n={} root={}", n, root));
      const std::vector<Range> pieces = uneven_pieces(n);
      // The root's buffer is the whole, in place; another rank's buffer is its piece alone.
      Buffers buffers(static_cast<std::size_t>(n));
      for (std::size_t r = 0; r < buffers.size(); ++r) {
        const bool is_root = static_cast<int>(r) == root;
        const std::size_t count = is_root ? end_of(pieces) : pieces[r].size();
        for (std::size_t i = 0; i < count; ++i) buffers[r].push_back(Symbols::leaf(r, i));
      }
      Symbols symbols;
      const auto gather = plans_of(n, [&](int rank) { return plan_gather(rank, pieces, root); });
      ASSERT_NO_FATAL_FAILURE(
          simulate(gather, buffers, symbols, [&](std::size_t r, const auto& buffer) {
            auto expected = buffers[r];
            for (int p = 0; p < n && static_cast<int>(r) == root; ++p) {
              for (std::size_t k = 0; k < pieces[p].size() && p != root; ++k) {
                expected[pieces[p].begin + k] = buffers[p][k];
              }
            }
            ASSERT_EQ(buffer, expected);
          }));
      const auto scatter = plans_of(n, [&](int rank) { return plan_scatter(rank, pieces, root); });
      ASSERT_NO_FATAL_FAILURE(
          simulate(scatter, buffers, symbols, [&](std::size_t r, const auto& buffer) {
            auto expected = buffers[r];
            for (std::size_t k = 0; k < pieces[r].size() && static_cast<int>(r) != root; ++k) {
              expected[k] = buffers[root][pieces[r].begin + k];
            }
            ASSERT_EQ(buffer, expected);
          }));
    }
  }
}

TEST(PlanDeathTest, AskingForAPlanThatDoesNotExistIsABug) {
  EXPECT_DEATH(plan_all_reduce(Algorithm::kAuto, 0, 2, 1), "check failed");
  EXPECT_DEATH(plan_all_reduce(Algorithm::kNative, 0, 2, 1), "check failed");
  EXPECT_DEATH(plan_reduce_scatter(Algorithm::kTree, 0, {{0, 1}, {1, 1}}), "check failed");
  EXPECT_DEATH(plan_broadcast(2, 2, 1, 0), "check failed");
}

}  // namespace
}  // namespace lockstep::plan_test
