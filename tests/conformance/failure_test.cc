// What ends badly ends everywhere, at once, and for good.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "lockstep/comm/call.h"
#include "tests/support/build_kind.h"
#include "tests/support/places.h"

namespace lockstep::test::failure_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;
using Clock = Deadline::Clock;

class Failure : public testing::TestWithParam<Place> {
 protected:
  Failure() : data_(static_cast<std::size_t>(GetParam().world_size)), group_(options()) {
    for (auto& vectors : data_) vectors.resize(4, std::vector<float>(5000, 1.0F));
  }

  static GroupOptions options() {
    GroupOptions options;
    options.medium = GetParam().medium;
    options.world_size = GetParam().world_size;
    options.timeout = 5s;
    return options;
  }

  int last() const { return group_.world_size() - 1; }
  BufferView data(const Communicator& comm, std::size_t which = 0) {
    return std::span(data_[static_cast<std::size_t>(comm.rank())][which]);
  }
  Call all_reduce(const Communicator& comm, std::size_t which = 0) {
    return calls::all_reduce(data(comm, which), ReduceOp::kSum);
  }
  void warm_up() {
    group_.run([&](Communicator& comm) { comm.run(all_reduce(comm)); });
  }
  // Returns when all ranks but `rank` are inside a collective.
  void await_others_inside(int rank) {
    const Deadline deadline = Deadline::after(30s);
    for (int r = 0; r < group_.world_size(); ++r) {
      while (r != rank && !group_[r].progress().front().inside && !deadline.expired()) {
        std::this_thread::yield();
      }
    }
  }
  static void expect_error(const std::optional<Error>& error, ErrorCode code,
                           const std::string& words) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), code) << error->what();
    EXPECT_THAT(error->what(), HasSubstr(words));
  }

  // Per rank. Outlives the group, whose threads may be in it until the communicators are gone.
  std::vector<std::vector<std::vector<float>>> data_;
  Group group_;
};

TEST_P(Failure, AbortEndsABlockedCollective) {
  warm_up();
  Clock::time_point aborted;
  const auto errors = group_.errors([&](Communicator& comm) {
    if (comm.rank() == last()) {
      await_others_inside(last());
      aborted = Clock::now();
      comm.abort("no more");
    }
    comm.run(all_reduce(comm));
  });
  EXPECT_LT(Clock::now() - aborted, kSlack);
  for (const auto& error : errors) {
    expect_error(error, ErrorCode::kAborted, "no more");
    EXPECT_EQ(error->rank(), last());
    EXPECT_THAT(error->what(), HasSubstr("rank " + std::to_string(last())));
  }
}

TEST_P(Failure, AbortEndsEverythingPending) {
  warm_up();
  std::atomic<int> started{0};  // ranks whose works are all pending
  const auto errors = group_.errors([&](Communicator& comm) {
    if (comm.rank() == 0) {
      const Deadline deadline = Deadline::after(30s);
      while (started.load() < last() && !deadline.expired()) std::this_thread::yield();
      await_others_inside(0);
      comm.abort("no more");
      return;
    }
    std::vector<Work> works;
    for (std::size_t i = 0; i < 3; ++i) works.push_back(comm.start(all_reduce(comm, i)));
    ++started;
    for (Work& work : works) {
      try {
        work.wait(Deadline::after(30s));
        ADD_FAILURE() << "work ended well";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kAborted) << error.what();
      }
      EXPECT_TRUE(work.done());
    }
    comm.start(all_reduce(comm));
  });
  EXPECT_FALSE(errors[0]);
  for (std::size_t r = 1; r < errors.size(); ++r) {
    expect_error(errors[r], ErrorCode::kAborted, "no more");
  }
}

TEST_P(Failure, AnAbsentRankIsNamed) {
  warm_up();
  const auto start = Clock::now();
  const auto errors = group_.errors([&](Communicator& comm) {
    if (comm.rank() == 1) return;
    CallOptions options;
    options.deadline = Deadline::after(300ms);
    comm.all_reduce(data(comm), ReduceOp::kSum, options);
  });
  const auto took = Clock::now() - start;
  EXPECT_GE(took, 300ms);
  EXPECT_LT(took, 300ms + 1s + kSlack);
  EXPECT_FALSE(errors[1]);
  const auto later = group_.errors([&](Communicator& comm) { comm.barrier(); });
  for (std::size_t r = 0; r < errors.size(); ++r) {
    const auto& error = r == 1 ? later[r] : errors[r];
    expect_error(error, ErrorCode::kTimeout, "rank 1");
    EXPECT_EQ(error->rank(), 1);
    EXPECT_STREQ(later[r]->what(), error->what());
  }
}

TEST_P(Failure, WaitingForWorkEndsAtTheDeadline) {
  warm_up();
  const auto errors = group_.errors([&](Communicator& comm) {
    if (comm.rank() != 0) return;
    Work work = comm.start(all_reduce(comm));
    const auto start = Clock::now();
    try {
      work.wait(Deadline::after(100ms));
    } catch (const Error&) {
      const auto took = Clock::now() - start;
      EXPECT_GE(took, 100ms);
      EXPECT_LT(took, 100ms + kSlack);
      throw;
    }
  });
  expect_error(errors[0], ErrorCode::kAborted, "all_reduce sum f32 x 5000");
  const auto later = group_.errors([&](Communicator& comm) { comm.barrier(); });
  for (const auto& error : later) expect_error(error, ErrorCode::kAborted, "all_reduce");
}

TEST_P(Failure, DestroyingWithWorkUnderWayDoesNotWait) {
  warm_up();
  Clock::duration took{};
  const auto errors = group_.errors([&](Communicator& comm) {
    if (comm.rank() == 0) {
      comm.start(all_reduce(comm));
      const auto start = Clock::now();
      group_.destroy(0);
      took = Clock::now() - start;
      return;
    }
    if (comm.rank() == 1) comm.barrier();
    comm.run(all_reduce(comm));
  });
  EXPECT_LT(took, kSlack);
  for (std::size_t r = 1; r < errors.size(); ++r) {
    ASSERT_TRUE(errors[r]) << "rank " << r;
  }
}

// Whoever has waited for its work may let the communicator go.
TEST_P(Failure, DestroyingAfterWorkHarmsNobody) {
  for (int i = 0; i < 200; ++i) {
    group_.run([&](Communicator& comm) {
      const auto part = comm.split(0, 0);
      part->start(all_reduce(comm)).wait(Deadline::after(30s));
    });
  }
}

TEST_P(Failure, DestroyingACommunicatorLeavesNobodyWaiting) {
  warm_up();
  const auto start = Clock::now();
  const auto errors = group_.errors([&](Communicator& comm) {
    if (comm.rank() == 1) {
      group_.destroy(1);
      return;
    }
    CallOptions options;
    options.deadline = Deadline::after(2s);
    comm.all_reduce(data(comm), ReduceOp::kSum, options);
  });
  EXPECT_LT(Clock::now() - start, 2s + 1s + kSlack);
  for (std::size_t r = 0; r < errors.size(); ++r) {
    if (r == 1) continue;
    ASSERT_TRUE(errors[r]) << "rank " << r;
    EXPECT_THAT(errors[r]->what(), HasSubstr("rank 1"));
    EXPECT_EQ(errors[r]->rank(), 1) << errors[r]->what();
  }
}

TEST_P(Failure, WrongUsageHarmsNobody) {
  group_.run([&](Communicator& comm) {
    const auto expect = [&](ErrorCode code, const std::function<void()>& body) {
      try {
        body();
        ADD_FAILURE() << "was accepted";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), code) << error.what();
      }
    };
    const BufferView all = data(comm);
    CallOptions native;
    native.algorithm = Algorithm::kNative;
    expect(ErrorCode::kInvalidRank, [&] { comm.broadcast(all, 99); });
    expect(ErrorCode::kSizeMismatch, [&] { comm.all_gather(all, all); });
    expect(ErrorCode::kInvalidArgument, [&] { comm.all_reduce(all, ReduceOp::kSum, native); });
    expect(ErrorCode::kInvalidArgument,
           [&] { comm.reduce_scatter(all, all, ReduceOp::kSum, {1}); });
    comm.run(all_reduce(comm));
    if (data_[static_cast<std::size_t>(comm.rank())][0][0] !=
        static_cast<float>(comm.world_size())) {
      throw std::runtime_error("wrong sum");
    }
  });
}

// Blocking and asynchronous calls count together: each sees what the one before it left.
TEST_P(Failure, BlockingCallsWaitForWorkBeforeThem) {
  group_.run([&](Communicator& comm) {
    std::vector<Work> works;
    for (std::size_t i = 0; i < 4; ++i) works.push_back(comm.start(all_reduce(comm, i)));
    comm.run(all_reduce(comm, 3));
    for (Work& work : works) {
      if (!work.done()) throw std::runtime_error("a blocking call overtook work");
      work.wait(Deadline::after(1s));
    }
    const auto n = static_cast<float>(comm.world_size());
    const auto& mine = data_[static_cast<std::size_t>(comm.rank())];
    for (std::size_t i = 0; i < 4; ++i) {
      const std::vector<float> expected(5000, i == 3 ? n * n : n);
      if (mine[i] != expected) throw std::runtime_error("wrong sum");
    }
  });
}

constexpr int kSizes[] = {2, 3};
INSTANTIATE_TEST_SUITE_P(All, Failure,
                         testing::ValuesIn(places({GroupMedium::kLocal, GroupMedium::kLocalMessages,
                                                   GroupMedium::kTcp, GroupMedium::kTcpRails,
                                                   GroupMedium::kShm},
                                                  kSizes)),
                         place_name);

}  // namespace
}  // namespace lockstep::test::failure_test
