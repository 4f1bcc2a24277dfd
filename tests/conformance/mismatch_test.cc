// One rank calls something else: all ranks end, and the message names the ranks and both calls.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/comm/call.h"
#include "tests/support/build_kind.h"
#include "tests/support/places.h"

namespace lockstep::test::mismatch_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

constexpr int kOdd = 1;  // the rank that differs

// Memory for any of the calls below.
struct Room {
  std::vector<float> in = std::vector<float>(4000, 1.0F);
  std::vector<float> out = std::vector<float>(4000);
  std::vector<double> wide = std::vector<double>(4000);

  BufferView data(std::size_t count) { return {out.data(), count, DataType::kF32}; }
  ConstBufferView source(std::size_t count) { return {in.data(), count, DataType::kF32}; }
};

struct Difference {
  std::string name;
  std::function<Call(Room&, int rank)> usual;
  std::function<Call(Room&, int rank)> odd;
  std::string usual_words;
  std::string odd_words;
};

CallOptions with_algorithm(Algorithm algorithm) {
  CallOptions options;
  options.algorithm = algorithm;
  return options;
}

std::vector<Difference> differences() {
  const auto all_reduce = [](std::size_t count, ReduceOp op = ReduceOp::kSum,
                             CallOptions options = {}) {
    return [=](Room& room, int) { return calls::all_reduce(room.data(count), op, options); };
  };
  const auto broadcast = [](int root) {
    return [=](Room& room, int) { return calls::broadcast(room.data(500), root); };
  };
  const auto reduce_scatter = [](std::vector<std::size_t> counts) {
    return [=](Room& room, int rank) {
      return calls::reduce_scatter(room.source(60),
                                   room.data(counts[static_cast<std::size_t>(rank)]),
                                   ReduceOp::kSum, counts);
    };
  };
  const auto gather = [](std::size_t count, int root) {
    return [=](Room& room, int rank) {
      return calls::gather(room.source(count), room.data(rank == root ? 3 * count : 0), root);
    };
  };
  const auto scatter = [](std::size_t count, int root) {
    return [=](Room& room, int rank) {
      return calls::scatter(room.source(rank == root ? 3 * count : 0), room.data(count), root);
    };
  };
  const auto all_to_all = [](std::size_t count) {
    return [=](Room& room, int) {
      return calls::all_to_all(room.source(3 * count), room.data(3 * count));
    };
  };
  const auto nodes = [](LeafOwners owners) {
    return [=](Room& room, int rank) {
      const std::vector<ConstBufferView> partials(owned_nodes(owners, rank).size(),
                                                  room.source(100));
      return calls::reduce_nodes(partials, owners, room.data(100));
    };
  };
  const auto barrier = [](Room&, int) { return calls::barrier(); };
  CallOptions bucket_4;
  bucket_4.bucket = 4;
  CallOptions bucket_5;
  bucket_5.bucket = 5;
  CallOptions step_8;
  step_8.step = 8;
  CallOptions step_9;
  step_9.step = 9;
  return {
      {"count", all_reduce(1000), all_reduce(1001), "x 1000", "x 1001"},
      {"large_count", all_reduce(3900), all_reduce(3999), "x 3900", "x 3999"},
      {"type", all_reduce(100),
       [](Room& room, int) {
         return calls::all_reduce(std::span(room.wide).first(100), ReduceOp::kSum);
       },
       "sum f32", "sum f64"},
      {"op", all_reduce(100), all_reduce(100, ReduceOp::kMax), "all_reduce sum", "all_reduce max"},
      {"order", all_reduce(100), broadcast(2), "all_reduce", "broadcast"},
      {"barrier", all_reduce(100), barrier, "all_reduce", "barrier"},
      {"message_or_memory", all_reduce(100), all_to_all(100), "all_reduce", "all_to_all"},
      {"algorithm", all_reduce(100, ReduceOp::kSum, with_algorithm(Algorithm::kTree)),
       all_reduce(100, ReduceOp::kSum, with_algorithm(Algorithm::kDirect)), "(tree)", "(direct)"},
      {"automatic_algorithm", all_reduce(100),
       all_reduce(100, ReduceOp::kSum, with_algorithm(Algorithm::kRing)), "all_reduce", "(ring)"},
      {"bucket", all_reduce(100, ReduceOp::kSum, bucket_4),
       all_reduce(100, ReduceOp::kSum, bucket_5), "bucket 4", "bucket 5"},
      {"step", all_reduce(100, ReduceOp::kSum, step_8), all_reduce(100, ReduceOp::kSum, step_9),
       "step 8", "step 9"},
      {"root_of_broadcast", broadcast(0), broadcast(2), "root 0", "root 2"},
      {"root_of_reduce",
       [](Room& room, int) {
         return calls::reduce(room.source(100), room.data(100), ReduceOp::kSum, 0);
       },
       [](Room& room, int) {
         return calls::reduce(room.source(100), room.data(100), ReduceOp::kSum, 2);
       },
       "root 0", "root 2"},
      {"root_of_gather", gather(100, 0), gather(100, 2), "root 0", "root 2"},
      {"root_of_scatter", scatter(100, 0), scatter(100, 2), "root 0", "root 2"},
      {"count_of_gather", gather(100, 0), gather(101, 0), "x 300", "x 303"},
      {"count_of_scatter", scatter(100, 0), scatter(101, 0), "x 300", "x 303"},
      {"counts", reduce_scatter({10, 20, 30}), reduce_scatter({30, 20, 10}), "shape", "shape"},
      {"owners", nodes({0, 1, 1, 2}), nodes({0, 0, 1, 2}), "reduce_nodes", "reduce_nodes"},
      // Sizes of its messages are all that ranks know of each other's all-to-all.
      {"count_of_all_to_all", all_to_all(100), all_to_all(101), "400", "404"},
  };
}

class Mismatch : public testing::TestWithParam<Place> {};

TEST_P(Mismatch, EndsEverywhereWithBothDescriptions) {
  for (const Difference& difference : differences()) {
    SCOPED_TRACE(difference.name);
    GroupOptions options;
    options.medium = GetParam().medium;
    options.world_size = GetParam().world_size;
    options.timeout = 5s;
    Group group(options);
    std::vector<Room> rooms(static_cast<std::size_t>(group.world_size()));
    const auto start = Deadline::Clock::now();
    const auto errors = group.errors([&](Communicator& comm) {
      Room& room = rooms[static_cast<std::size_t>(comm.rank())];
      comm.all_reduce(room.data(10), ReduceOp::kSum);
      const auto& make = comm.rank() == kOdd ? difference.odd : difference.usual;
      comm.run(make(room, comm.rank()));
      // Who only sends may be done before anybody has looked; nobody gets past this.
      comm.barrier();
    });
    EXPECT_LT(Deadline::Clock::now() - start, options.timeout + kSlack);
    for (std::size_t r = 0; r < errors.size(); ++r) {
      SCOPED_TRACE("rank " + std::to_string(r));
      ASSERT_TRUE(errors[r]);
      EXPECT_TRUE(errors[r]->code() == ErrorCode::kCollectiveMismatch ||
                  errors[r]->code() == ErrorCode::kSizeMismatch)
          << errors[r]->what();
      EXPECT_THAT(errors[r]->what(), HasSubstr("rank 1"));
      EXPECT_THAT(errors[r]->what(), HasSubstr(difference.usual_words));
      EXPECT_THAT(errors[r]->what(), HasSubstr(difference.odd_words));
    }
    // Dead for good, with the same words.
    const auto again = group.errors([](Communicator& comm) { comm.barrier(); });
    for (std::size_t r = 0; r < errors.size(); ++r) {
      ASSERT_TRUE(again[r]);
      EXPECT_STREQ(again[r]->what(), errors[r]->what());
    }
  }
}

// A call that repeats itself shows less of itself: what it was is still known when another differs.
TEST_P(Mismatch, IsFoundAfterTheSameCallManyTimes) {
  for (int times = 1; times <= 6; ++times) {
    SCOPED_TRACE(times);
    GroupOptions options;
    options.medium = GetParam().medium;
    options.world_size = GetParam().world_size;
    options.timeout = 5s;
    Group group(options);
    std::vector<Room> rooms(static_cast<std::size_t>(group.world_size()));
    const auto errors = group.errors([&](Communicator& comm) {
      Room& room = rooms[static_cast<std::size_t>(comm.rank())];
      const auto reduce = [&](std::size_t count) {
        comm.all_reduce(room.data(count), ReduceOp::kSum);
      };
      for (int i = 0; i < times; ++i) reduce(10);
      reduce(20);
      for (int i = 0; i < times; ++i) reduce(10);
      reduce(comm.rank() == kOdd ? 21 : 10);
      comm.barrier();
    });
    for (const auto& error : errors) {
      ASSERT_TRUE(error);
      EXPECT_EQ(error->code(), ErrorCode::kCollectiveMismatch) << error->what();
      EXPECT_THAT(error->what(), HasSubstr("x 10 ("));
      EXPECT_THAT(error->what(), HasSubstr("x 21"));
    }
  }
}

constexpr int kSizes[] = {3};
INSTANTIATE_TEST_SUITE_P(All, Mismatch,
                         testing::ValuesIn(places({GroupMedium::kLocal, GroupMedium::kLocalMessages,
                                                   GroupMedium::kTcp, GroupMedium::kTcpRails,
                                                   GroupMedium::kShm},
                                                  kSizes)),
                         place_name);

}  // namespace
}  // namespace lockstep::test::mismatch_test
