#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "gpu_cases.h"
#include "local_device_transport.h"
#include "lockstep/comm/nccl/cuda_reducer.h"
#include "reducer_cases.h"
#include "tests/support/ranks.h"

namespace lockstep {
namespace {

using test::error_of;
using test::run_ranks;
using ::testing::HasSubstr;

constexpr std::size_t kSmallRound = 64;  // many rounds for small vectors

LeafOwners dealt_owners(std::uint32_t lanes, int world_size) {
  LeafOwners owners;
  for (std::uint32_t lane = 0; lane < lanes; ++lane) {
    owners.push_back(static_cast<int>(lane) % world_size);
  }
  return owners;
}

struct Case {
  int world_size = 1;
  std::size_t count = 0;
  DeviceReducerOptions options;
  std::vector<Range> ranges;  // reduced one after another
  std::size_t round = kSmallRound;
  bool gathers = false;  // all_gather at the end
  LeafOwners made_for =
      {};  // the reducer is made with these owners, if any, and then gets the others

  std::string name() const {
    return fmt::format("{} ranks, {} lanes, {} elements, {} ranges, rounds of {}", world_size,
                       options.owners.size(), count, ranges.size(), round);
  }
};

// What every rank holds before and after: [rank][partial].
using Vectors = std::vector<std::vector<std::vector<float>>>;

struct Ran {
  std::vector<std::vector<float>> leaves;
  Vectors before;
  Vectors after;
};

// Every rank is a thread with a stream of its own.
Ran run(const Case& test) {
  Ran ran;
  for (std::size_t lane = 0; lane < test.options.owners.size(); ++lane) {
    ran.leaves.push_back(wild_numbers(test.count, lane));
  }
  const auto world_size = static_cast<std::size_t>(test.world_size);
  ran.before.resize(world_size);
  ran.after.resize(world_size);
  for (std::size_t rank = 0; rank < world_size; ++rank) {
    for (const Range node : owned_nodes(test.options.owners, static_cast<int>(rank))) {
      ran.before[rank].push_back(
          tree_of(std::span(ran.leaves).subspan(node.begin, node.end - node.begin)));
    }
  }
  const auto hub = std::make_shared<LocalDeviceHub>(test.world_size);
  const auto errors = run_ranks(test.world_size, [&](int rank) {
    const auto& own = ran.before[static_cast<std::size_t>(rank)];
    const CudaStream stream = make_stream();
    std::vector<DeviceArray<float>> arrays;
    std::vector<float*> partials;
    for (const auto& partial : own) {
      arrays.emplace_back(test.count, "a test");
      partials.push_back(arrays.back().data());
      upload(partial, partials.back());
    }
    DeviceReducerOptions options = test.options;
    if (!test.made_for.empty()) options.owners = test.made_for;
    CudaReducer reducer(std::make_unique<LocalDeviceTransport>(hub, rank), options, test.round);
    if (!test.made_for.empty()) reducer.set_owners(test.options.owners);
    for (const Range range : test.ranges) reducer.reduce(partials, range, stream.get());
    if (test.gathers) reducer.all_gather(partials[0], stream.get());
    check_cuda(cudaStreamSynchronize(stream.get()), "waiting for a stream");
    for (const float* partial : partials) {
      ran.after[static_cast<std::size_t>(rank)].push_back(download(partial, test.count));
    }
  });
  for (const auto& error : errors) {
    EXPECT_FALSE(error) << test.name() << ": " << error->what();
  }
  EXPECT_EQ(hub->left_over(), 0U) << test.name();
  return ran;
}

// Elements `range` of rank `rank`'s first partial are those of `sum`.
void expect_sum(const Case& test, const Ran& ran, std::size_t rank, Range range,
                const std::vector<float>& sum) {
  ASSERT_FALSE(ran.after[rank].empty()) << test.name();
  const auto got = bits(ran.after[rank][0]);
  const auto expected = bits(sum);
  for (std::size_t i = range.begin; i < range.end; ++i) {
    ASSERT_EQ(got[i], expected[i]) << test.name() << ": rank " << rank << ", element " << i;
  }
}

// Nothing but the ranges of the first partial has changed.
void expect_rest(const Case& test, const Ran& ran, std::size_t rank) {
  ASSERT_EQ(ran.after[rank].size(), ran.before[rank].size()) << test.name();
  std::vector<bool> reduced(test.count);
  for (const Range& range : test.ranges) {
    std::fill_n(reduced.begin() + static_cast<std::ptrdiff_t>(range.begin), range.size(), true);
  }
  for (std::size_t row = 0; row < ran.after[rank].size(); ++row) {
    const auto before = bits(ran.before[rank][row]);
    const auto after = bits(ran.after[rank][row]);
    for (std::size_t i = 0; i < test.count; ++i) {
      if (row == 0 && reduced[i]) continue;
      ASSERT_EQ(after[i], before[i])
          << test.name() << ": rank " << rank << ", partial " << row << ", element " << i;
    }
  }
}

void expect_tree_everywhere(const Case& test) {
  const Ran ran = run(test);
  const std::vector<float> sum = tree_of(ran.leaves);
  for (std::size_t rank = 0; rank < ran.after.size(); ++rank) {
    for (const Range& range : test.ranges) expect_sum(test, ran, rank, range, sum);
    expect_rest(test, ran, rank);
  }
}

TEST(CudaReducer, GivesTheTreeOverLanesAtEveryWorldSize) {
  LOCKSTEP_NEEDS_GPU();
  for (const int world_size : {1, 2, 3, 4, 5, 8}) {
    for (const std::uint32_t lanes : {8U, 13U, 32U, 61U}) {
      for (const std::size_t count : {1U, 3U, 5U, 64U, 1003U}) {
        Case test{.world_size = world_size, .count = count, .options = {}, .ranges = {{0, count}}};
        test.options.owners = even_owners(lanes, world_size);
        test.options.elements = lanes == 13 ? count : 0;
        expect_tree_everywhere(test);
      }
    }
  }
}

TEST(CudaReducer, TakesLanesThatAreDealtOut) {
  LOCKSTEP_NEEDS_GPU();
  for (const int world_size : {2, 3, 8}) {
    Case test{.world_size = world_size, .count = 777, .options = {}, .ranges = {{0, 777}}};
    test.options.owners = dealt_owners(61, world_size);
    ASSERT_GT(owned_nodes(test.options.owners, 0).size(), 5U);
    expect_tree_everywhere(test);
  }
}

// More partials than it was made for come in shorter rounds, as it takes no more memory.
TEST(CudaReducer, LanesChangeHands) {
  LOCKSTEP_NEEDS_GPU();
  for (const int world_size : {2, 3, 4}) {
    for (const std::size_t elements : {0U, 100003U}) {
      Case test{.world_size = world_size,
                .count = 100003,
                .options = {},
                .ranges = {{50000, 100003}, {0, 50000}},
                .round = CudaReducer::kRoundElements};
      test.made_for = even_owners(64, world_size);
      test.options.owners = dealt_owners(64, world_size);
      test.options.elements = elements;
      ASSERT_GT(maximal_nodes(test.options.owners).size(), maximal_nodes(test.made_for).size());
      expect_tree_everywhere(test);
      std::swap(test.made_for, test.options.owners);
      expect_tree_everywhere(test);
    }
  }
}

TEST(CudaReducer, ReducesPiecesWhereverTheyLie) {
  LOCKSTEP_NEEDS_GPU();
  for (const std::size_t round : {kSmallRound, CudaReducer::kRoundElements}) {
    for (const std::size_t elements : {0U, 2000U}) {
      Case test{.world_size = 3, .count = 2000, .options = {}, .ranges = {}, .round = round};
      test.options.owners = even_owners(10, 3);
      test.options.elements = elements;
      test.ranges = {{1003, 1503}, {3, 20}, {20, 21}, {21, 21}, {1503, 2000}, {100, 612}};
      expect_tree_everywhere(test);
    }
  }
}

TEST(CudaReducer, HandlesManyRanksWithSeveralNodesEach) {
  LOCKSTEP_NEEDS_GPU();
  Case test{.world_size = 64, .count = 500, .options = {}, .ranges = {{0, 500}}, .round = 4096};
  test.options.owners = even_owners(150, 64);
  ASSERT_GT(maximal_nodes(test.options.owners).size(), 100U);
  expect_tree_everywhere(test);
}

TEST(CudaReducer, CutsLargePiecesIntoRounds) {
  LOCKSTEP_NEEDS_GPU();
  constexpr std::size_t kCount = 300007;
  Case test{.world_size = 4, .count = kCount, .options = {}, .ranges = {}, .round = 1 << 14};
  test.options.owners = even_owners(6, 4);
  test.ranges = {{kCount / 2, kCount}, {0, kCount / 2}};
  expect_tree_everywhere(test);
}

// Some are empty, and none begins at a multiple of four but the first.
std::vector<std::size_t> odd_shards(std::size_t count, int world_size) {
  std::vector<std::size_t> shards(static_cast<std::size_t>(world_size), 0);
  std::size_t left = count;
  for (std::size_t r = 0; r + 1 < shards.size(); ++r) {
    if (r == 1) continue;
    shards[r] = std::min(left, count / shards.size() / 2 * 2 + 1);
    left -= shards[r];
  }
  shards.back() = left;
  return shards;
}

TEST(CudaReducer, GivesEachRankItsShardAndGathersThem) {
  LOCKSTEP_NEEDS_GPU();
  for (const int world_size : {1, 2, 3, 5, 8}) {
    for (const bool gathers : {false, true}) {
      constexpr std::size_t kCount = 1500;
      Case test{.world_size = world_size, .count = kCount, .options = {}, .ranges = {}};
      test.options.owners = even_owners(13, world_size);
      test.options.shards = odd_shards(kCount, world_size);
      test.ranges = {{700, 1500}, {0, 301}, {301, 700}};  // together all
      test.gathers = gathers;
      const Ran ran = run(test);
      const std::vector<float> sum = tree_of(ran.leaves);
      std::size_t begin = 0;
      for (std::size_t rank = 0; rank < ran.after.size(); ++rank) {
        const std::size_t own = test.options.shards[rank];
        expect_sum(test, ran, rank, gathers ? Range{0, kCount} : Range{begin, begin + own}, sum);
        expect_rest(test, ran, rank);
        begin += own;
      }
    }
  }
}

// Groups of one, two and three; some shards are empty.
TEST(CudaReducer, GivesBuddiesEachOthersShards) {
  LOCKSTEP_NEEDS_GPU();
  const std::vector<std::vector<Range>> groups = {
      {{0, 2}}, {{0, 3}}, {{0, 2}, {2, 5}}, {{0, 1}, {1, 3}, {3, 6}, {6, 8}}};
  for (const std::vector<Range>& of : groups) {
    constexpr std::size_t kCount = 1500;
    const int world_size = static_cast<int>(of.back().end);
    Case test{.world_size = world_size, .count = kCount, .options = {}, .ranges = {}};
    test.options.owners = even_owners(13, world_size);
    test.options.shards = odd_shards(kCount, world_size);
    for (const Range group : of) {
      for (std::size_t rank = group.begin; rank < group.end; ++rank) {
        test.options.buddies.push_back(group);
      }
    }
    test.ranges = {{700, 1500}, {0, 301}, {301, 700}};  // together all
    const Ran ran = run(test);
    const std::vector<float> sum = tree_of(ran.leaves);
    const auto begin_of = [&](std::size_t rank) {
      const auto first = test.options.shards.begin();
      return std::accumulate(first, first + static_cast<std::ptrdiff_t>(rank), std::size_t{0});
    };
    for (std::size_t rank = 0; rank < ran.after.size(); ++rank) {
      const Range group = test.options.buddies[rank];
      expect_sum(test, ran, rank, {begin_of(group.begin), begin_of(group.end)}, sum);
      expect_rest(test, ran, rank);
    }
  }
}

TEST(CudaReducer, NativelyAddsOwnPartialsFirst) {
  LOCKSTEP_NEEDS_GPU();
  for (const int world_size : {1, 2, 3, 5}) {
    for (const bool sharded : {false, true}) {
      Case test{.world_size = world_size, .count = 1003, .options = {}, .ranges = {{5, 905}}};
      test.options.owners = even_owners(13, world_size);
      test.options.native = true;
      if (sharded) test.options.shards = odd_shards(test.count, world_size);
      const Ran ran = run(test);
      std::vector<std::vector<float>>
          sums;  // of each rank; the test's transport adds them in order
      for (const auto& partials : ran.before) sums.push_back(chain_of(partials));
      for (std::size_t rank = 0; rank < ran.after.size(); ++rank) {
        expect_sum(test, ran, rank, test.ranges[0], chain_of(sums));
        expect_rest(test, ran, rank);
      }
    }
  }
}

TEST(CudaReducer, RefusesWhatDoesNotFit) {
  LOCKSTEP_NEEDS_GPU();
  const auto make = [](const DeviceReducerOptions& options, int world_size = 2) {
    const auto hub = std::make_shared<LocalDeviceHub>(world_size);
    return std::make_unique<CudaReducer>(std::make_unique<LocalDeviceTransport>(hub, 0), options);
  };
  const auto refusal = [&](const DeviceReducerOptions& options) {
    const Error error = error_of([&] { make(options); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return std::string(error.what());
  };
  EXPECT_THAT(refusal({.owners = {0, 0}}), HasSubstr("rank 1 of 2 has none of the 2 lanes"));
  EXPECT_THAT(refusal({.owners = {0, 1, 2}}), HasSubstr("belongs to rank 2"));
  EXPECT_THAT(refusal({.owners = {0, 1}, .shards = {1}}), HasSubstr("1 shards for 2 ranks"));
  EXPECT_THAT(refusal({.owners = {0, 1}, .shards = {1, 2}, .elements = 4}),
              HasSubstr("the shards have 3 elements, the vector 4"));
  EXPECT_THAT(refusal({.owners = {0, 1}, .buddies = {{0, 2}, {0, 2}}}),
              HasSubstr("2 ranks have buddies, but 0 have shards"));
  for (const std::vector<Range>& buddies :
       {std::vector<Range>{{0, 2}, {1, 2}}, {{0, 1}, {0, 1}}, {{0, 1}, {1, 3}}}) {
    EXPECT_THAT(refusal({.owners = {0, 1}, .shards = {1, 2}, .buddies = buddies}),
                HasSubstr("do not have it as theirs"));
  }
  EXPECT_THAT(refusal({.owners = dealt_owners(5000, 2)}), HasSubstr("5000 partial sums"));

  const auto reducer = make({.owners = {0, 1}, .elements = 8});
  const std::vector<float*> none;
  EXPECT_THAT(error_of([&] {
                reducer->reduce(none, {0, 8}, nullptr);
              }).what(),
              HasSubstr("rank 0 owns 1 nodes, but brings 0"));
  const std::vector<float*> one{nullptr};
  EXPECT_THAT(error_of([&] {
                reducer->reduce(one, {4, 9}, nullptr);
              }).what(),
              HasSubstr("5 elements from 4 on, of a vector of 8"));
  EXPECT_THAT(error_of([&] { reducer->all_gather(nullptr, nullptr); }).what(),
              HasSubstr("no shards"));
  reducer->abort();
  EXPECT_EQ(error_of([&] { reducer->check(); }).code(), ErrorCode::kAborted);
  EXPECT_EQ(error_of([&] { reducer->reduce(one, {0, 8}, nullptr); }).code(), ErrorCode::kAborted);
}

}  // namespace
}  // namespace lockstep
