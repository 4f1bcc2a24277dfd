#include "lockstep/server/server_engine.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <future>
#include <limits>

#include "lockstep/comm/call.h"
#include "lockstep/server/server_run.h"
#include "tests/support/case_lists.h"
#include "tests/support/star.h"

namespace lockstep::server_engine_test {
namespace {

using namespace test;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr auto kTimeout = 20s;
constexpr std::size_t kWindow = 64 * 1024;  // so that small tests reach the paths of large sums

HostOptions server_for(int ranks, Deadline::Clock::duration timeout = kTimeout) {
  HostOptions options;
  options.world_size = ranks;
  options.timeout = timeout;
  return options;
}

StarOptions rank_options(const ServerRun& server, int rank) {
  StarOptions options;
  options.coordinator = {server.address().host(), server.address().port()};
  options.timeout = kTimeout;
  options.rank = rank;
  return options;
}

// A server and its ranks, all threads of this process.
struct StarGroup {
  explicit StarGroup(int world_size, Deadline::Clock::duration timeout = kTimeout)
      : server(listen_tcp(SocketAddress::loopback_v4()), server_for(world_size, timeout), kWindow),
        comms(static_cast<std::size_t>(world_size)) {
    const auto errors = run_ranks(world_size, [&](int rank) {
      StarOptions options = rank_options(server, rank);
      options.world_size = world_size;
      comms[static_cast<std::size_t>(rank)] = connect_star(options, join_star(options));
    });
    expect_no_errors(errors);
  }

  template <typename Body>
  std::vector<std::optional<Error>> errors(Body&& body) {
    return run_ranks(static_cast<int>(comms.size()),
                     [&](int rank) { body(*comms[static_cast<std::size_t>(rank)]); });
  }
  template <typename Body>
  void run(Body&& body) {
    expect_no_errors(errors(std::forward<Body>(body)));
  }
  // Nobody leaves while others still need it.
  void leave() {
    run([](Communicator& comm) { comm.barrier(); });
    comms.clear();
    EXPECT_FALSE(server.finish(soon()));
  }

  ServerRun server;
  std::vector<std::unique_ptr<Communicator>> comms;
};

// Every collective with every type and every operation, few elements and not quite so few.
std::vector<test::Case> cases_for(int n) {
  std::vector<test::Case> cases;
  std::size_t turn = 0;
  const auto add = [&](test::Case c) {
    c.world_size = n;
    c.root = static_cast<int>(turn % static_cast<std::size_t>(n));
    c.uneven = turn % 2 == 1;
    c.in_place = turn % 3 == 1;
    c.asynchronous = turn % 5 == 4;
    c.count = std::array<std::size_t, 4>{7, 1, 131, 0}[turn % 4];
    ++turn;
    cases.push_back(c);
  };
  for (int t = 0; t < 7; ++t) {
    test::Case c;
    c.type = static_cast<DataType>(t);
    for (const auto moved : {Collective::kAllGather, Collective::kBroadcast, Collective::kGather,
                             Collective::kScatter, Collective::kAllToAll, Collective::kBarrier}) {
      c.collective = moved;
      add(c);
    }
    for (int o = 0; o < 5; ++o) {
      c.op = static_cast<ReduceOp>(o);
      for (const auto reduced :
           {Collective::kAllReduce, Collective::kReduceScatter, Collective::kReduce}) {
        c.collective = reduced;
        add(c);
      }
      for (const auto nodes : {Collective::kReduceNodes, Collective::kReduceScatterNodes}) {
        test::Case over = c;
        over.collective = nodes;
        over.lanes = static_cast<std::uint32_t>(2 * n + 1);
        over.scattered_lanes = turn % 2 == 1;
        // The server adds nothing that is not finite.
        over.small_values = t < 2 && o < 2;
        add(over);
      }
    }
  }
  return cases;
}

TEST(ServerEngine, LanesOfAnyOwnershipGiveTheTreesBits) {
  constexpr std::uint32_t kLanes = 13;
  constexpr std::size_t kElements = 2 * kLanePiece + 17;
  const auto sum = [](auto& self, std::size_t begin, std::size_t end) -> std::vector<float> {
    if (end - begin == 1) return gradient(static_cast<int>(begin), kElements);
    const std::size_t middle = begin + tree_split(end - begin);
    auto left = self(self, begin, middle);
    const auto right = self(self, middle, end);
    for (std::size_t i = 0; i < left.size(); ++i) left[i] += right[i];
    return left;
  };
  const auto expected = sum(sum, 0, kLanes);
  const std::vector<LeafOwners> deals = {even_owners(kLanes, 3),
                                         {0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2},
                                         {2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2},
                                         {0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0}};
  StarGroup group(3);
  expect_no_errors(group.errors([&](Communicator& comm) {
    for (const LeafOwners& owners : deals) {
      std::vector<std::vector<float>> values;
      std::vector<ConstBufferView> partials;
      for (const Range& node : owned_nodes(owners, comm.rank())) {
        values.push_back(sum(sum, node.begin, node.end));
      }
      for (const auto& value : values) partials.emplace_back(std::span(value));
      std::vector<float> out(kElements);
      comm.reduce_nodes(partials, owners, std::span(out));
      EXPECT_EQ(out, expected);
    }
  }));
}

class ServerEngineTest : public ::testing::TestWithParam<int> {};

TEST_P(ServerEngineTest, EveryCollectiveGivesTheCanonicalBits) {
  StarGroup group(GetParam());
  for (const test::Case& c : cases_for(GetParam())) {
    const test::CaseData data = test::make_data(c);
    const auto thrown = group.errors([&](Communicator& comm) {
      try {
        test::run_case(comm, c, data);
      } catch (const std::runtime_error& wrong) {
        ADD_FAILURE() << wrong.what();
      }
    });
    expect_no_errors(thrown);
    ASSERT_FALSE(HasFailure()) << to_string(c);
  }
  group.leave();
}

INSTANTIATE_TEST_SUITE_P(WorldSize, ServerEngineTest, ::testing::Values(1, 2, 3, 5));

// Several pieces, strips and rounds, and numbers that round.
TEST(ServerEngine, LargeSumsHaveTheBitsOfTheLocalGroup) {
  constexpr int kRanks = 3;
  constexpr std::size_t kElements = 2 * kLanePiece + 17;
  constexpr std::size_t kNumbers = 5000;
  const LeafOwners owners = even_owners(11, kRanks);
  struct Result {
    std::vector<float> sum = std::vector<float>(kElements);
    std::vector<double> numbers = std::vector<double>(kNumbers);
    std::vector<float> moved = std::vector<float>(20 * kLanePiece);
  };
  const auto run = [&](Communicator& comm, Result& result) {
    std::vector<std::vector<float>> partials;
    std::vector<std::vector<double>> wide;
    std::vector<ConstBufferView> views;
    std::vector<ConstBufferView> wide_views;
    for (const Range& node : owned_nodes(owners, comm.rank())) {
      partials.push_back(gradient(static_cast<int>(node.begin), kElements));
      wide.emplace_back(partials.back().begin(), partials.back().begin() + kNumbers);
    }
    for (auto& each : partials) views.emplace_back(std::span<const float>(each));
    for (auto& each : wide) {
      for (double& value : each) value = value / 3 + 1e-20;
      wide_views.emplace_back(std::span<const double>(each));
    }
    comm.reduce_nodes(views, owners, std::span(result.sum));
    comm.reduce_nodes(wide_views, owners, std::span(result.numbers), ReduceOp::kMean);
    if (comm.rank() == 2) result.moved = gradient(99, result.moved.size());
    comm.broadcast(std::span(result.moved), 2);
    comm.all_reduce(std::span(result.moved).first(kElements), ReduceOp::kMean);
  };
  std::vector<Result> ours(kRanks);
  std::vector<Result> theirs(kRanks);
  StarGroup star(kRanks);
  star.run([&](Communicator& comm) { run(comm, ours[static_cast<std::size_t>(comm.rank())]); });
  star.leave();
  test::GroupOptions options;
  options.world_size = kRanks;
  test::Group local(options);
  local.run([&](Communicator& comm) { run(comm, theirs[static_cast<std::size_t>(comm.rank())]); });
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(ours[rank].sum, theirs[rank].sum);
    EXPECT_EQ(ours[rank].numbers, theirs[rank].numbers);
    EXPECT_EQ(ours[rank].moved, theirs[rank].moved);
  }
}

// The short end of a sum is there with what goes before it: nothing more arrives that would remind
// the server of the rank that is ahead.
TEST(ServerEngine, WhatIsThereAlreadyWaitsForNothing) {
  const LeafOwners owners = even_owners(2, 2);
  StarGroup group(2, 1h);
  CallOptions options;
  options.deadline = Deadline::after(60s);
  group.run([&](Communicator& comm) {
    std::vector<float> data(kLanePiece + 17, 1.0F);
    const std::vector<float> mine(data.size(), 1.0F);
    for (int i = 0; i < 100; ++i) {
      comm.reduce_nodes({std::span<const float>(mine)}, owners, std::span(data), ReduceOp::kSum,
                        options);
    }
  });
  group.leave();
}

TEST(ServerEngine, RanksAreGivenOrFromTheEnvironment) {
  for (const bool given : {true, false}) {
    ServerRun server(listen_tcp(SocketAddress::loopback_v4()), server_for(3));
    std::atomic<int> seen{0};
    const auto errors = run_ranks(3, [&](int i) {
      StarOptions options = rank_options(server, given ? 2 - i : -1);
      options.world_size = given ? 3 : 0;
      const auto comm = connect_star(options, join_star(options));
      if (given) {
        EXPECT_EQ(comm->rank(), 2 - i);
      }
      EXPECT_EQ(comm->world_size(), 3);
      EXPECT_TRUE(comm->finite_only());
      EXPECT_THAT(comm->name_of(comm->rank()), HasSubstr(fmt::format("rank {} (", comm->rank())));
      seen += 1 << comm->rank();
      comm->barrier();
    });
    expect_no_errors(errors);
    EXPECT_EQ(seen, 7);
    EXPECT_FALSE(server.finish(soon()));
  }
}

TEST(ServerEngine, TwoWorkersOfOneRankAreNamed) {
  ServerRun server(listen_tcp(SocketAddress::loopback_v4()), server_for(2));
  const auto errors = run_ranks(2, [&](int) {
    StarOptions options = rank_options(server, 1);
    options.world_size = 2;
    connect_star(options, join_star(options));
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_THAT(error->what(), HasSubstr("rank 1 was started twice"));
  }
}

TEST(ServerEngine, AnotherWorldSizeThanTheCoordinatorsIsRefused) {
  ServerRun server(listen_tcp(SocketAddress::loopback_v4()), server_for(1));
  StarOptions options = rank_options(server, 0);
  options.world_size = 2;
  const Error error = error_of([&] { connect_star(options, join_star(options)); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidWorldSize);
  EXPECT_THAT(error.what(), HasSubstr("was started for a world of 2, the rendezvous for 1"));
}

TEST(ServerEngine, AWorkerOfTheSyntheticJobIsToldThatRanksAreServedHere) {
  ServerRun server(listen_tcp(SocketAddress::loopback_v4()), server_for(1));
  WorkerOptions options;
  options.coordinator = {server.address().host(), server.address().port()};
  options.timeout = kTimeout;
  EXPECT_THAT(error_of([&] { WorkerClient client(options); }).what(),
              HasSubstr("serves ranks of 'lockstep train' (mode lanes)"));
}

TEST(ServerEngine, DifferentCallsNameBothRanksAndBothCalls) {
  using Make = std::function<Call(std::span<float>)>;
  const LeafOwners owners = even_owners(4, 3);
  const auto nodes = [&](int rank, std::uint32_t bucket) {
    return [&owners, rank, bucket](std::span<float> room) {
      CallOptions options;
      options.bucket = bucket;
      const std::vector<ConstBufferView> partials(owned_nodes(owners, rank).size(),
                                                  std::span<const float>(room).first(10));
      return calls::reduce_nodes(partials, owners, room.subspan(10, 10), ReduceOp::kSum, options);
    };
  };
  struct Difference {
    Make usual;
    Make odd;
    const char* words;
    const char* odd_words;
  };
  const auto reduce = [](ReduceOp op, std::size_t count) {
    return [=](std::span<float> room) { return calls::all_reduce(room.first(count), op); };
  };
  for (const Difference& difference :
       {Difference{reduce(ReduceOp::kSum, 5), reduce(ReduceOp::kMax, 5), "all_reduce sum f32 x 5",
                   "all_reduce max f32 x 5"},
        Difference{reduce(ReduceOp::kSum, 5), reduce(ReduceOp::kSum, 6), "all_reduce sum f32 x 5",
                   "all_reduce sum f32 x 6"},
        Difference{reduce(ReduceOp::kSum, 5), [](std::span<float>) { return calls::barrier(); },
                   "all_reduce sum f32 x 5", "barrier"},
        Difference{{}, {}, "bucket 3", "bucket 4"}}) {
    StarGroup group(3);
    const auto errors = group.errors([&](Communicator& comm) {
      std::vector<float> room(100);
      const bool odd = comm.rank() == 1;
      const Make& make = odd ? difference.odd : difference.usual;
      comm.run(make ? make(room) : nodes(comm.rank(), odd ? 4 : 3)(room));
    });
    for (const auto& error : errors) {
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), ErrorCode::kCollectiveMismatch) << error->what();
      EXPECT_EQ(error->rank(), 1);
      EXPECT_THAT(error->what(),
                  AllOf(ContainsRegex("rank 1 \\(.*\\) called .*, rank 0 \\(.*\\) called "),
                        HasSubstr("as collective 1"), HasSubstr(difference.words),
                        HasSubstr(difference.odd_words)));
    }
    group.comms.clear();
    const auto cause = group.server.finish(soon());
    ASSERT_TRUE(cause);
    EXPECT_EQ(cause->code(), ErrorCode::kCollectiveMismatch);
  }
}

TEST(ServerEngine, SumsOfDifferentLengthsAreDifferentCalls) {
  StarGroup group(2);
  const LeafOwners owners = even_owners(2, 2);
  const auto errors = group.errors([&](Communicator& comm) {
    const std::size_t count = comm.rank() == 0 ? 10 : 11;
    std::vector<float> data(count);
    comm.reduce_nodes({std::span<const float>(data)}, owners, std::span(data));
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kCollectiveMismatch) << error->what();
    EXPECT_THAT(error->what(), AllOf(HasSubstr("rank 0 ("), HasSubstr("rank 1 ("),
                                     HasSubstr("reduce_nodes sum f32 x 10"),
                                     HasSubstr("reduce_nodes sum f32 x 11")));
  }
}

// Ranks that wait for nobody run ahead of the one that has to wait for all.
TEST(ServerEngine, BytesOfLaterCallsAreKeptForThem) {
  StarGroup group(3);
  constexpr std::int32_t kCalls = 50;
  std::promise<void> others_are_done;
  std::atomic<int> done{0};
  group.run([&](Communicator& comm) {
    for (std::int32_t call = 0; call < kCalls; ++call) {
      const std::vector<std::int32_t> mine{call, comm.rank()};
      std::vector<std::int32_t> all(6);
      // The last to come is the one that is waited for.
      if (comm.rank() == 2 && call == 0) others_are_done.get_future().wait();
      comm.gather(std::span(mine), std::span(all), 0);
      if (comm.rank() == 0) {
        EXPECT_EQ(all, (std::vector<std::int32_t>{call, 0, call, 1, call, 2}));
      }
      if (comm.rank() == 1 && call + 1 == kCalls && done++ == 0) others_are_done.set_value();
    }
  });
  group.leave();
}

// So many bytes may be kept; then all wait for each other. Two messages in flight, many pieces.
TEST(ServerEngine, NobodyRunsAheadForEver) {
  StarGroup group(2);
  constexpr std::size_t kElements = std::size_t{3} << 20;
  group.run([&](Communicator& comm) {
    for (int call = 0; call < 4; ++call) {
      std::vector<float> data(kElements, static_cast<float>(comm.rank() + call));
      comm.broadcast(std::span(data), 1);
      EXPECT_EQ(data, std::vector<float>(kElements, static_cast<float>(1 + call)));
    }
  });
  group.leave();
}

TEST(ServerEngine, AllToAllWithOtherCountsThanExpectedIsNamed) {
  StarGroup group(2);
  const auto errors = group.errors([&](Communicator& comm) {
    const std::vector<float> in(5);
    std::vector<float> out(comm.rank() == 0 ? 5 : 6);
    const std::vector<std::size_t> sent =
        comm.rank() == 0 ? std::vector<std::size_t>{2, 3} : std::vector<std::size_t>{3, 2};
    const std::vector<std::size_t> expected =
        comm.rank() == 0 ? std::vector<std::size_t>{2, 3} : std::vector<std::size_t>{4, 2};
    comm.all_to_all(std::span(in), std::span(out), sent, expected);
  });
  ASSERT_TRUE(errors[1]);
  EXPECT_EQ(errors[1]->code(), ErrorCode::kSizeMismatch);
  EXPECT_EQ(errors[1]->rank(), 0);
  EXPECT_THAT(errors[1]->what(), ContainsRegex("rank 0 \\(.*\\) sent 12 bytes where rank 1 "
                                               "\\(.*\\) expected 16, in all_to_all f32"));
}

TEST(ServerEngine, NonFiniteSumsEndTheJobAndNameTheRank) {
  StarGroup group(2);
  const LeafOwners owners = even_owners(2, 2);
  const auto errors = group.errors([&](Communicator& comm) {
    std::vector<float> data(10, 1.0F);
    if (comm.rank() == 1) data[7] = std::numeric_limits<float>::quiet_NaN();
    comm.reduce_nodes({std::span<const float>(data)}, owners, std::span(data));
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kNonFinite);
    EXPECT_EQ(error->rank(), 1);
    EXPECT_THAT(error->what(), HasSubstr("element 7"));
  }
  // It stays so.
  EXPECT_EQ(error_of([&] { group.comms[0]->barrier(); }).code(), ErrorCode::kNonFinite);
}

TEST(ServerEngine, AbortEndsABlockedCallOnEveryRank) {
  StarGroup group(3);
  const auto errors = group.errors([&](Communicator& comm) {
    if (comm.rank() == 2) return comm.abort("the test says so");
    std::vector<float> data(100000, 1.0F);
    comm.all_reduce(std::span(data), ReduceOp::kSum);
  });
  for (int rank = 0; rank < 2; ++rank) {
    const auto& error = errors[static_cast<std::size_t>(rank)];
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kAborted);
    EXPECT_EQ(error->rank(), 2);
    EXPECT_THAT(error->what(), HasSubstr("the test says so"));
  }
}

TEST(ServerEngine, AbortFromAnotherThreadEndsABlockedCallHere) {
  StarGroup group(2);
  const auto errors = run_ranks(2, [&](int i) {
    if (i == 1) return group.comms[0]->abort("enough");
    std::vector<float> data(100000, 1.0F);
    group.comms[0]->all_reduce(std::span(data), ReduceOp::kSum);  // rank 1 never comes
  });
  ASSERT_TRUE(errors[0]);
  EXPECT_THAT(errors[0]->what(), ContainsRegex("^aborted: rank 0 \\(.*\\) aborted: enough$"));
  const Error other = error_of([&] { group.comms[1]->barrier(); });
  EXPECT_EQ(other.code(), ErrorCode::kAborted);
  EXPECT_THAT(other.what(), HasSubstr("enough"));
}

TEST(ServerEngine, ACallEndsAtItsDeadlineAndTheOthersLearnIt) {
  StarGroup group(2);
  CallOptions options;
  options.deadline = Deadline::after(50ms);
  const Error error = error_of([&] { group.comms[0]->barrier(options); });
  EXPECT_EQ(error.code(), ErrorCode::kTimeout);
  EXPECT_THAT(error.what(), HasSubstr("barrier"));
  EXPECT_EQ(error.rank(), 1);
  EXPECT_THAT(error.what(), HasSubstr("has not entered collective 1 (barrier)"));
  // What rank 0 has sent may still get it through one barrier before it hears.
  const auto hears = [&] {
    for (int i = 0; i < 2; ++i) group.comms[1]->barrier();
  };
  expect_same(error_of(hears), error);
}

// At once: the next heartbeat would come in 12 minutes.
TEST(ServerEngine, WhoLeavesWhileOthersGoOnIsNamed) {
  StarGroup group(2, 1h);
  group.comms[1].reset();
  CallOptions options;
  options.deadline = soon();
  const Error error = error_of([&] { group.comms[0]->barrier(options); });
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(error.rank(), 1);
  EXPECT_THAT(error.what(), HasSubstr("has left the job"));
  const auto cause = group.server.finish(soon());
  ASSERT_TRUE(cause);
  EXPECT_STREQ(cause->what(), error.what());
}

TEST(ServerEngine, AServerThatIsStoppedTellsItsRanksWhy) {
  StarGroup group(2);
  EXPECT_FALSE(group.server.finish(Deadline::after({})));
  for (auto& comm : group.comms) {
    const Error error = error_of([&] { comm->barrier(); });
    EXPECT_EQ(error.code(), ErrorCode::kAborted);
    EXPECT_THAT(error.what(), ContainsRegex("the coordinator \\(.*told to stop"));
  }
}

TEST(ServerEngine, SplitSaysThatThereAreNoSubGroups) {
  StarGroup group(2);
  const auto errors = group.errors([](Communicator& comm) { comm.split(0, 0); });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error->what(), HasSubstr("no sub-groups"));
  }
  group.leave();  // it has not failed
}

}  // namespace
}  // namespace lockstep::server_engine_test
