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

INSTANTIATE_TEST_SUITE_P(All, MessageMismatch,
                         testing::Values(GroupMedium::kLocal, GroupMedium::kTcp,
                                         GroupMedium::kShm));

}  // namespace
}  // namespace lockstep::test::pair_messages_test
