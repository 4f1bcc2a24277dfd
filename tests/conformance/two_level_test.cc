// Collectives between hosts with several ranks each: ranks that pretend to be on different hosts.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <thread>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/index.h"
#include "lockstep/base/random.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "tests/support/build_kind.h"
#include "tests/support/case_lists.h"
#include "tests/support/fault_transport.h"
#include "tests/support/job_groups.h"

namespace lockstep::test::two_level_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

struct Shape {
  std::string name;
  std::vector<int> hosts;  // per rank
};
const std::vector<Shape> kShapes = {
    {"2x2", {0, 0, 1, 1}},
    {"3x2", {0, 0, 1, 1, 2, 2}},
    {"2x4", {0, 0, 0, 0, 1, 1, 1, 1}},
    {"3and1", {0, 0, 0, 1}},
    {"2and3and1", {0, 0, 1, 1, 1, 2}},
    {"InTurn", {0, 1, 0, 1}},
    {"Anyhow", {0, 1, 1, 0, 2, 1, 0}},
};

GroupOptions options_for(GroupMedium medium, const std::vector<int>& hosts) {
  GroupOptions options;
  options.medium = medium;
  options.world_size = static_cast<int>(hosts.size());
  options.hosts = hosts;
  options.timeout = 6s;
  return options;
}

class TwoLevel : public testing::TestWithParam<Shape> {};

TEST_P(TwoLevel, GivesTheBitsOfOneLevel) {
  constexpr std::size_t kCount = 30'011;
  const std::vector<int>& hosts = GetParam().hosts;
  const std::vector<int> one_host(hosts.size(), 0);
  struct Way {
    GroupMedium medium;
    std::vector<int> hosts;
    Algorithm algorithm;
    bool allocated;
  };
  const std::vector<Way> ways = {
      {GroupMedium::kLocal, one_host, Algorithm::kShared, false},
      {GroupMedium::kLocal, hosts, Algorithm::kDirect, false},
      {GroupMedium::kLocal, hosts, Algorithm::kTwoLevel, false},
      {GroupMedium::kAuto, hosts, Algorithm::kTwoLevel, false},
      {GroupMedium::kAuto, hosts, Algorithm::kTwoLevel, true},
      {GroupMedium::kAuto, hosts, Algorithm::kAuto, true},
  };
  std::vector<std::string> hashes;
  for (const Way& way : ways) {
    Group group(options_for(way.medium, way.hosts));
    std::vector<std::string> of_rank(hosts.size());
    group.run([&](Communicator& comm) {
      const auto rank = static_cast<std::uint64_t>(comm.rank());
      const Buffer memory = way.allocated ? comm.allocate(kCount * sizeof(float))
                                          : Buffer::heap(kCount * sizeof(float));
      const std::span<float> data = memory.as<float>();
      for (std::size_t i = 0; i < kCount; ++i) {
        data[i] = random_f32(7, rank, i) * (i % 3 == 0 ? -1000.0F : 0.001F);
      }
      CallOptions options;
      options.algorithm = way.algorithm;
      const Call call = calls::all_reduce(data, ReduceOp::kSum, options);
      if (way.algorithm == Algorithm::kAuto) {
        EXPECT_EQ(comm.algorithm_for(call), Algorithm::kTwoLevel);
      }
      comm.run(call);
      of_rank[rank] = to_hex(blake3(std::as_bytes(data)));
    });
    for (const std::string& hash : of_rank) EXPECT_EQ(hash, of_rank[0]);
    hashes.push_back(of_rank[0]);
  }
  EXPECT_THAT(hashes, testing::Each(hashes[0]));
}

// Every collective that has it, with every type, operation and root; one case in `every`.
std::vector<Case> some_cases(int world_size, std::size_t every) {
  std::vector<Case> some;
  for (const auto make : {reduction_cases, move_cases, node_cases}) {
    std::vector<Case> cases = make(world_size, Sharing::kHosts);
    std::erase_if(cases, [](const Case& c) { return c.algorithm != Algorithm::kTwoLevel; });
    for (std::size_t i = 0; i < cases.size(); ++i) {
      // Which of the lists' cases have two levels follows a pattern: these must not follow it too.
      cases[i].allocated = i % 2 == 0;
      cases[i].asynchronous = i % 7 == 3;
      if (i % every == 0) some.push_back(cases[i]);
    }
  }
  return some;
}

TEST_P(TwoLevel, Cases) {
  const std::vector<int>& hosts = GetParam().hosts;
  const int n = static_cast<int>(hosts.size());
  const bool all = GetParam().name == "2and3and1" && kSanitizers.empty();
  Group threads(options_for(GroupMedium::kLocal, hosts));
  run_cases(threads, some_cases(n, all ? 1 : 13));
  Group mesh(options_for(GroupMedium::kAuto, hosts));
  run_cases(mesh, some_cases(n, 29));
}

INSTANTIATE_TEST_SUITE_P(Shapes, TwoLevel, testing::ValuesIn(kShapes),
                         [](const auto& shape) { return shape.param.name; });

// The result's first element that is not finite, on every rank, wherever it was brought.
TEST(TwoLevelOutcome, TellsWhereTheResultIsNotFinite) {
  Group group(options_for(GroupMedium::kAuto, {0, 0, 1, 1, 1}));
  group.run([&](Communicator& comm) {
    std::vector<float> data(20'000, 1.0F);
    if (comm.rank() == 3) data[17'000] = std::numeric_limits<float>::infinity();
    CallOptions options;
    options.algorithm = Algorithm::kTwoLevel;
    options.check_finite = true;
    const std::vector<float> in = data;
    std::vector<float> chunk(4000);
    EXPECT_EQ(comm.all_reduce(std::span(data), ReduceOp::kSum, options).first_non_finite, 17'000);
    const Outcome scattered =
        comm.reduce_scatter(std::span(in), std::span(chunk), ReduceOp::kSum, {}, options);
    EXPECT_EQ(scattered.first_non_finite,
              comm.rank() == 4 ? std::optional<std::size_t>(1000) : std::nullopt);
  });
}

// Groups within groups, some of them on one host, some with two levels of their own.
TEST(TwoLevelGroups, AreSplitLikeOthers) {
  Group group(options_for(GroupMedium::kAuto, {0, 0, 1, 1, 1, 1}));
  group.run([&](Communicator& comm) {
    const auto odd = comm.split(comm.rank() % 2, 0);           // 1 + 2 ranks
    const auto last = comm.split(comm.rank() < 3 ? 0 : 1, 0);  // 2 + 1 and 3 ranks
    for (int i = 0; i < 3; ++i) {
      for (Communicator* part : {&comm, odd.get(), last.get()}) {
        std::vector<std::int32_t> data(40'000, 1);
        part->all_reduce(std::span(data), ReduceOp::kSum);
        EXPECT_THAT(data, testing::Each(part->world_size()));
      }
    }
    CallOptions options;
    options.algorithm = Algorithm::kTwoLevel;
    std::vector<std::int32_t> data(4000, 1);
    odd->all_reduce(std::span(data), ReduceOp::kSum, options);
    EXPECT_THAT(data, testing::Each(3));
  });
}

class TwoLevelFailure : public testing::TestWithParam<GroupMedium> {
 protected:
  TwoLevelFailure() : group_(options_for(GetParam(), {0, 0, 1, 1})) {
    options_.algorithm = Algorithm::kTwoLevel;
    for (std::vector<float>& data : data_) data.assign(50'000, 1.0F);
  }

  BufferView data(const Communicator& comm) { return std::span(data_[index_of(comm.rank())]); }
  void warm_up() {
    group_.run([&](Communicator& comm) { comm.all_reduce(data(comm), ReduceOp::kSum, options_); });
  }

  std::array<std::vector<float>, 4> data_;
  Group group_;
  CallOptions options_;
};

TEST_P(TwoLevelFailure, AnAbsentRankIsNamedOnEveryHost) {
  warm_up();
  for (const int absent : {3}) {
    const auto start = Deadline::Clock::now();
    const auto errors = group_.errors([&](Communicator& comm) {
      if (comm.rank() == absent) return;
      CallOptions options = options_;
      options.deadline = Deadline::after(300ms);
      comm.all_reduce(data(comm), ReduceOp::kSum, options);
    });
    EXPECT_LT(Deadline::Clock::now() - start, 300ms + 1s + kSlack);
    for (int rank = 0; rank < 3; ++rank) {
      ASSERT_TRUE(errors[index_of(rank)]);
      EXPECT_EQ(errors[index_of(rank)]->code(), ErrorCode::kTimeout);
      EXPECT_EQ(errors[index_of(rank)]->rank(), absent) << errors[index_of(rank)]->what();
      EXPECT_THAT(errors[index_of(rank)]->what(), HasSubstr("rank 3"));
    }
  }
}

// Rank 3 comes late: its neighbour waits for it, and the other host for what it has to send.
TEST_P(TwoLevelFailure, WhoWaitsForWhomIsNoted) {
  warm_up();
  const auto waits_for = [&](int rank) { return group_[rank].progress().front().waits_for; };
  group_.run([&](Communicator& comm) {
    const Deadline deadline = Deadline::after(30s);
    while (comm.rank() == 3 && !deadline.expired() && (waits_for(2) != 3 || waits_for(1) != 3)) {
      std::this_thread::yield();
    }
    comm.all_reduce(data(comm), ReduceOp::kSum, options_);
    EXPECT_FALSE(deadline.expired());
  });
}

TEST_P(TwoLevelFailure, AnAbortReachesBothHosts) {
  warm_up();
  const auto errors = group_.errors([&](Communicator& comm) {
    if (comm.rank() == 1) {
      while (!group_[0].progress().front().inside || !group_[3].progress().front().inside) {
        std::this_thread::yield();
      }
      comm.abort("no more");
    }
    comm.all_reduce(data(comm), ReduceOp::kSum, options_);
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kAborted);
    EXPECT_EQ(error->rank(), 1);
  }
}

TEST_P(TwoLevelFailure, ARankThatCallsAnotherCountIsNamed) {
  warm_up();
  const auto errors = group_.errors([&](Communicator& comm) {
    const std::size_t count = comm.rank() == 2 ? 49'999 : 50'000;
    comm.all_reduce(data(comm).slice({0, count}), ReduceOp::kSum, options_);
    comm.barrier();
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kCollectiveMismatch) << error->what();
    EXPECT_THAT(error->what(), HasSubstr("x 49999"));
    EXPECT_THAT(error->what(), HasSubstr("x 50000"));
  }
}

TEST_P(TwoLevelFailure, ARankThatTakesOneLevelIsNamed) {
  const auto errors = group_.errors([&](Communicator& comm) {
    CallOptions options = options_;
    if (comm.rank() == 2) options.algorithm = Algorithm::kDirect;
    comm.all_reduce(data(comm), ReduceOp::kSum, options);
    comm.barrier();
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kCollectiveMismatch) << error->what();
    EXPECT_THAT(error->what(), HasSubstr("(two-level)"));
    EXPECT_THAT(error->what(), HasSubstr("(direct)"));
  }
}

INSTANTIATE_TEST_SUITE_P(Media, TwoLevelFailure,
                         testing::Values(GroupMedium::kLocal, GroupMedium::kAuto),
                         [](const auto& medium) { return std::string(to_string(medium.param)); });

// Others tell of a rank that is stopped there what it was in, and its deadline runs.
TEST(TwoLevelProgress, ARankThatCopiesItsVectorIsInTheCollective) {
  const GroupOptions options = options_for(GroupMedium::kAuto, {0, 0, 1, 1});
  Rendezvous rendezvous(options);
  RankThreads threads(4);
  std::array<Progress, 4> seen;
  const auto thrown = threads.run([&](int rank) {
    std::unique_ptr<Communicator> comm;
    auto transport =
        std::make_unique<FaultTransport>(rendezvous.join(options, rank), FaultPoint::kShowing,
                                         [&] { seen[index_of(rank)] = comm->progress().front(); });
    FaultTransport& faults = *transport;
    comm = std::make_unique<Communicator>(std::make_unique<PlanEngine>(std::move(transport)),
                                          options.timeout);
    std::vector<float> data(50'000);
    comm->all_reduce(std::span(data), ReduceOp::kSum);  // the first has to connect
    faults.arm();
    comm->all_reduce(std::span(data), ReduceOp::kSum);
  });
  EXPECT_THAT(thrown, testing::Each(nullptr));
  for (const Progress& progress : seen) {
    EXPECT_EQ(progress.sequence, 2U);
    EXPECT_TRUE(progress.inside);
  }
}

// Only one rank sees rank 2 on a host of its own.
TEST(TwoLevelHosts, RanksThatSeeOtherHostsAreNamed) {
  const GroupOptions usual = options_for(GroupMedium::kAuto, {0, 1, 0, 1});
  const GroupOptions odd = options_for(GroupMedium::kAuto, {0, 1, 2, 1});
  Rendezvous rendezvous(usual);
  RankThreads threads(4);
  std::vector<std::optional<Error>> errors(4);
  threads.run([&](int rank) {
    Communicator comm(std::make_unique<PlanEngine>(rendezvous.join(rank == 2 ? odd : usual, rank)),
                      usual.timeout);
    std::vector<float> data(50'000);
    try {
      comm.all_reduce(std::span(data), ReduceOp::kSum);
    } catch (const Error& error) {
      errors[index_of(rank)] = error;
    }
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kCollectiveMismatch) << error->what();
    EXPECT_THAT(error->what(), HasSubstr("do not agree on which ranks share a host"));
  }
}

}  // namespace
}  // namespace lockstep::test::two_level_test
