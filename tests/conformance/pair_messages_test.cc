// Messages between two ranks of a communicator, and groups that only their members make.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "tests/support/places.h"

namespace lockstep::test::pair_messages_test {
namespace {

using namespace std::chrono_literals;

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

template <typename Body>
ErrorCode code_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.code();
  }
  throw std::runtime_error("no error");
}

class PairMessages : public testing::TestWithParam<Place> {};

// Everybody sends everybody large messages, all at once, beside a collective.
TEST_P(PairMessages, AllAtOnce) {
  GetParam().group().run([&](Communicator& comm) {
    constexpr std::size_t kCount = 100'000;
    const int n = comm.world_size();
    std::vector<std::int32_t> out(kCount, comm.rank());
    std::vector<std::vector<std::int32_t>> in(static_cast<std::size_t>(n),
                                              std::vector<std::int32_t>(kCount, -1));
    std::vector<Work> works;
    for (int peer = 0; peer < n; ++peer) {
      if (peer == comm.rank()) continue;
      const std::span<std::int32_t> place(in[static_cast<std::size_t>(peer)]);
      works.push_back(comm.start(calls::recv(place, peer, 3)));
      works.push_back(comm.start(calls::send(std::span<const std::int32_t>(out), peer, 3)));
    }
    std::vector<float> sum(1000, 1.0F);
    comm.all_reduce(std::span(sum), ReduceOp::kSum);
    for (Work& work : works) work.wait(Deadline::after(30s));
    for (int peer = 0; peer < n; ++peer) {
      if (peer == comm.rank()) continue;
      require(in[static_cast<std::size_t>(peer)] == std::vector<std::int32_t>(kCount, peer),
              "another message came");
    }
    require(sum[999] == static_cast<float>(n), "wrong sum");
  });
}

TEST_P(PairMessages, InOrder) {
  GetParam().group().run([&](Communicator& comm) {
    for (std::uint32_t i = 0; i < 20; ++i) {
      std::vector<std::int64_t> data(i, 7 * i);
      if (comm.rank() == 0) comm.send(std::span<const std::int64_t>(data), 1, i);
      if (comm.rank() != 1) continue;
      std::vector<std::int64_t> got(i, -1);
      comm.recv(std::span(got), 0, i);
      require(got == data, "another message came");
    }
    comm.barrier();
  });
}

TEST_P(PairMessages, ToItselfOrNobody) {
  GetParam().group().run([&](Communicator& comm) {
    std::vector<float> data(1);
    require(code_of([&] { comm.send(std::span<const float>(data), comm.rank()); }) ==
                ErrorCode::kSelfSend,
            "a message to itself");
    require(
        code_of([&] { comm.recv(std::span(data), comm.world_size()); }) == ErrorCode::kInvalidRank,
        "a message from nobody");
    require(code_of([&] { comm.recv(std::span(data), -1); }) == ErrorCode::kInvalidRank, "rank -1");
    require(code_of([&] { comm.send(std::span<const float>(data), kAnySource); }) ==
                ErrorCode::kInvalidRank,
            "a message to any rank");
    comm.barrier();
  });
}

// Messages of each rank come in their order, whatever their size; who sent one is told.
TEST_P(PairMessages, FromAnyRank) {
  GetParam().group().run([&](Communicator& comm) {
    const int n = comm.world_size();
    const std::size_t sizes[] = {3, 0, 200'000, 0, 1};
    for (std::uint32_t i = 0; i < std::size(sizes); ++i) {
      if (comm.rank() > 0) {
        comm.send(std::span<const std::int32_t>(std::vector<std::int32_t>(sizes[i], comm.rank())),
                  0, i);
        continue;
      }
      std::vector<bool> heard(static_cast<std::size_t>(n));
      for (int message = 1; message < n; ++message) {
        std::vector<std::int32_t> data(sizes[i], -1);
        const Outcome outcome = comm.recv_any(std::span(data), i);
        require(outcome.source > 0 && outcome.source < n, "nobody has sent it");
        require(!heard[static_cast<std::size_t>(outcome.source)], "a message came twice");
        heard[static_cast<std::size_t>(outcome.source)] = true;
        require(data == std::vector<std::int32_t>(sizes[i], outcome.source), "another one came");
      }
    }
    comm.barrier();
  });
}

// A message goes to the receive that was called first among those that it fits.
TEST_P(PairMessages, FromAnyRankBesideNamedOnes) {
  GetParam().group().run([&](Communicator& comm) {
    const bool third = comm.world_size() > 2;
    const auto send = [&](std::int32_t number, std::uint32_t tag) {
      comm.send(std::span<const std::int32_t>(std::vector{number}), 0, tag);
    };
    std::vector<std::int32_t> got(6, -1);
    const auto place = [&](std::size_t i) { return std::span(got).subspan(i, 1); };
    std::vector<Work> works;
    if (comm.rank() == 0) {
      works.push_back(comm.start(calls::recv(place(0), 1, 7)));
      works.push_back(comm.start(calls::recv_any(place(1), 7)));
      works.push_back(comm.start(calls::recv(place(2), 1, 7)));
      works.push_back(comm.start(calls::recv_any(place(3), 7)));
      if (third) works.push_back(comm.start(calls::recv_any(place(4), 8)));
    }
    comm.barrier();
    if (comm.rank() == 2) send(80, 8);
    if (comm.rank() == 0 && third) {  // no receive of another tag holds it up
      require(works[4].wait(Deadline::after(30s)).source == 2, "another rank");
      require(got == std::vector{-1, -1, -1, -1, 80, -1} && !works[1].done(), "another tag");
    }
    comm.barrier();
    if (comm.rank() == 1) {
      for (const std::int32_t number : {71, 72, 73, 74}) send(number, 7);
      send(90, 9);
    }
    if (comm.rank() == 0) {
      for (std::size_t i = 0; i < 4; ++i) {
        require(works[i].wait(Deadline::after(30s)).source == (i % 2 == 0 ? -1 : 1), "source");
      }
      comm.recv(place(5), 1, 9);
      require(got == std::vector{71, 72, 73, 74, third ? 80 : -1, 90}, "another order");
    }
    comm.barrier();
  });
}

TEST_P(PairMessages, FromAnyRankOfAGroup) {
  GetParam().group().run([&](Communicator& comm) {
    const int n = comm.world_size();
    std::vector<int> members(static_cast<std::size_t>(n));
    std::iota(members.rbegin(), members.rend(), 0);
    const auto group = comm.subgroup(members, "a");
    std::vector<double> data(1000, group->rank());
    if (group->rank() == 0) {
      for (int message = 1; message < n; ++message) {
        const int source = group->recv_any(std::span(data)).source;
        require(source > 0 && data == std::vector<double>(1000, source), "another message came");
      }
    } else {
      group->send(std::span<const double>(data), 0);
    }
    comm.barrier();
  });
}

// Only the members call it, and the others have collectives of their own meanwhile.
TEST_P(PairMessages, GroupsOfTheirMembers) {
  GetParam().group().run([&](Communicator& comm) {
    const int n = comm.world_size();
    std::vector<int> members(static_cast<std::size_t>(n - 1));
    std::iota(members.rbegin(), members.rend(), 1);  // n - 1, ..., 1
    if (comm.rank() > 0) {
      for (const char* label : {"a", "b"}) {
        const auto group = comm.subgroup(members, label);
        require(group->rank() == n - 1 - comm.rank(), "wrong rank");
        std::vector<std::int32_t> data(5000, comm.rank());
        group->all_reduce(std::span(data), ReduceOp::kSum);
        require(data[4999] == n * (n - 1) / 2, "wrong sum");
      }
    } else {
      require(code_of([&] { comm.subgroup(members, "c"); }) == ErrorCode::kInvalidRank,
              "rank 0 is no member");
      require(code_of([&] {
                comm.subgroup({0, 0}, "c");
              }) == ErrorCode::kInvalidRank,
              "a rank is there twice");
    }
    comm.barrier();
  });
}

constexpr int kSizes[] = {2, 3};
INSTANTIATE_TEST_SUITE_P(All, PairMessages,
                         testing::ValuesIn(places({GroupMedium::kLocal, GroupMedium::kLocalMessages,
                                                   GroupMedium::kTcp, GroupMedium::kShm},
                                                  kSizes)),
                         place_name);

class MessageMismatch : public testing::TestWithParam<GroupMedium> {};

TEST_P(MessageMismatch, NamesBothSides) {
  GroupOptions options;
  options.medium = GetParam();
  options.world_size = 2;
  Group group(options);
  const auto errors = group.errors([&](Communicator& comm) {
    std::vector<float> data(10);
    if (comm.rank() == 1) comm.recv(std::span(data), 0, 5);
    comm.send(std::span<const float>(data), 1, 4);
    comm.barrier();  // who only sends may be done before anybody has looked
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kCollectiveMismatch);
    EXPECT_EQ(error->rank(), errors[0]->rank());  // either may be wrong, but all name the same one
    EXPECT_THAT(error->what(), testing::HasSubstr("message f32 x 10, tag 4"));
    EXPECT_THAT(error->what(), testing::HasSubstr("message f32 x 10, tag 5"));
  }
}

TEST_P(MessageMismatch, WhoSendsNothingIsNamed) {
  GroupOptions options;
  options.medium = GetParam();
  options.world_size = 3;
  Group group(options);
  const auto errors = group.errors([&](Communicator& comm) {
    std::vector<float> data(10);
    if (comm.rank() == 1) comm.recv_any(std::span(data), 5, {.deadline = Deadline::after(200ms)});
    if (comm.rank() == 2) comm.send(std::span<const float>(data), 1, 4);
    comm.barrier();
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kTimeout);
    EXPECT_THAT(error->what(), testing::ContainsRegex("message f32 x 10, tag 5: rank 1 .* waited "
                                                      "in vain for data from rank 0 .* or rank 2"));
  }
}

INSTANTIATE_TEST_SUITE_P(All, MessageMismatch,
                         testing::Values(GroupMedium::kLocal, GroupMedium::kTcp,
                                         GroupMedium::kShm));

}  // namespace
}  // namespace lockstep::test::pair_messages_test
