// Groups within groups.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/build_kind.h"
#include "tests/support/places.h"

namespace lockstep::test::split_test {
namespace {

using namespace std::chrono_literals;

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

// The sum of what the members bring, which is their rank in the whole job plus one.
int sum_over(Communicator& comm, int job_rank) {
  std::vector<std::int32_t> data(1000, job_rank + 1);
  comm.all_reduce(std::span(data), ReduceOp::kSum);
  for (const std::int32_t value : data) require(value == data[0], "elements differ");
  return data[0];
}

class Split : public testing::TestWithParam<Place> {};

TEST_P(Split, ByColor) {
  GetParam().group().run([&](Communicator& comm) {
    const int color = comm.rank() % 2;
    const auto part = comm.split(color, 0);
    require(part != nullptr, "no group");
    require(part->world_size() == (comm.world_size() + 1 - color) / 2, "wrong size");
    require(part->rank() == comm.rank() / 2, "wrong rank");
    int expected = 0;
    int everybody = 0;
    for (int r = 0; r < comm.world_size(); ++r) {
      everybody += r + 1;
      if (r % 2 == color) expected += r + 1;
    }
    for (int i = 0; i < 5; ++i) {
      require(sum_over(*part, comm.rank()) == expected, "wrong sum in the part");
      require(sum_over(comm, comm.rank()) == everybody, "wrong sum in the whole");
    }
  });
}

TEST_P(Split, KeysOrderTheRanks) {
  GetParam().group().run([&](Communicator& comm) {
    const int n = comm.world_size();
    const auto reversed = comm.split(7, n - comm.rank());
    require(reversed->rank() == n - 1 - comm.rank(), "keys were not heeded");
    std::vector<std::int32_t> order(static_cast<std::size_t>(n));
    const std::vector<std::int32_t> mine{comm.rank()};
    reversed->all_gather(std::span(mine), std::span(order));
    for (int r = 0; r < n; ++r) {
      require(order[static_cast<std::size_t>(r)] == n - 1 - r, "wrong order");
    }
    // Equal keys: by rank.
    require(comm.split(0, 5)->rank() == comm.rank(), "ranks were not heeded");
  });
}

TEST_P(Split, NegativeColorsStayOutside) {
  GetParam().group().run([&](Communicator& comm) {
    const bool outside = comm.rank() == 1;
    const auto part = comm.split(outside ? -1 : 3, 0);
    require((part == nullptr) == outside, "who is inside?");
    if (part != nullptr) {
      const int n = comm.world_size();
      require(sum_over(*part, comm.rank()) == n * (n + 1) / 2 - 2, "wrong sum");
    }
    comm.barrier();
  });
}

TEST_P(Split, OneRankGroups) {
  GetParam().group().run([&](Communicator& comm) {
    const auto alone = comm.split(comm.rank(), 0);
    require(alone->world_size() == 1, "not alone");
    require(sum_over(*alone, comm.rank()) == comm.rank() + 1, "wrong sum");
    alone->barrier();
  });
}

// Several groups at once, used in different order by different ranks, and groups of groups.
TEST_P(Split, ManyAtOnce) {
  GetParam().group().run([&](Communicator& comm) {
    const int n = comm.world_size();
    const auto lower = comm.split(comm.rank() < n / 2 ? 0 : 1, 0);
    const auto odd = comm.split(comm.rank() % 2, 0);
    const auto whole = comm.split(0, 0);
    const auto nested = lower->split(0, -lower->rank());
    require(nested->world_size() == lower->world_size(), "wrong size of the nested group");
    require(nested->rank() == lower->world_size() - 1 - lower->rank(), "wrong nested rank");
    std::vector<float> a(2000, 1.0F);
    std::vector<float> b(2000, 1.0F);
    for (int i = 0; i < 3; ++i) {
      Call first;
      first.collective = Collective::kAllReduce;
      first.in = BufferView(std::span(a));
      first.out = BufferView(std::span(a));
      Work work = whole->start(first);
      nested->all_reduce(std::span(b), ReduceOp::kMax);
      odd->all_reduce(std::span(b), ReduceOp::kMax);
      lower->barrier();
      work.wait(Deadline::after(30s));
    }
    require(a == std::vector<float>(2000, static_cast<float>(n * n * n)), "wrong sum");
    require(b == std::vector<float>(2000, 1.0F), "wrong maximum");
  });
}

TEST_P(Split, AllFailTogether) {
  GroupOptions options;
  options.medium = GetParam().medium;
  options.world_size = GetParam().world_size;
  options.timeout = 5s;
  Group group(options);
  const auto errors = group.errors([&](Communicator& comm) {
    const auto part = comm.split(comm.rank() % 2, 0);
    comm.barrier();
    if (comm.rank() == 0) part->abort("this part is over");
    part->barrier();
    comm.barrier();
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kAborted) << error->what();
    EXPECT_THAT(error->what(), testing::HasSubstr("this part is over"));
  }
}

constexpr int kSizes[] = {2, 4, 7};
INSTANTIATE_TEST_SUITE_P(All, Split,
                         testing::ValuesIn(places({GroupMedium::kLocal, GroupMedium::kLocalMessages,
                                                   GroupMedium::kTcp, GroupMedium::kShm},
                                                  kSizes)),
                         place_name);

}  // namespace
}  // namespace lockstep::test::split_test
