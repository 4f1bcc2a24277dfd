#include "lockstep/comm/call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"
#include "lockstep/comm/call_check.h"
#include "lockstep/comm/kernels/outcome.h"

namespace lockstep::call_test {
namespace {

using testing::HasSubstr;

float memory[100];

BufferView floats(std::size_t count) { return {memory, count, DataType::kF32}; }
ConstBufferView const_floats(std::size_t count) { return {memory, count, DataType::kF32}; }

Call completed(Call call, int rank = 0, int world_size = 3) {
  complete_call(call, rank, world_size);
  return call;
}

void expect_refused(const Call& call, ErrorCode code, const std::string& words, int rank = 0) {
  try {
    completed(call, rank);
    ADD_FAILURE() << "was accepted: " << words;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(words));
    EXPECT_THAT(error.what(), HasSubstr(std::string(to_string(call.collective))));
  }
}

TEST(Calls, TheWholeIsKnownOnceCompleted) {
  const auto sum = ReduceOp::kSum;
  EXPECT_EQ(completed(calls::all_reduce(floats(10), sum)).total, 10U);
  EXPECT_EQ(completed(calls::broadcast(floats(10), 1)).total, 10U);
  EXPECT_EQ(completed(calls::reduce(const_floats(10), floats(10), sum, 0)).total, 10U);
  EXPECT_EQ(completed(calls::reduce_scatter(const_floats(10), floats(4), sum)).total, 10U);
  EXPECT_EQ(completed(calls::all_gather(const_floats(5), floats(15))).total, 15U);
  EXPECT_EQ(completed(calls::gather(const_floats(5), floats(15), 0)).total, 15U);
  EXPECT_EQ(completed(calls::scatter(const_floats(15), floats(5), 0)).total, 15U);
  EXPECT_EQ(completed(calls::all_to_all(const_floats(15), floats(15))).total, 15U);
  EXPECT_EQ(completed(calls::barrier()).total, 0U);
}

TEST(Calls, EvenCountsAreFilledIn) {
  const std::vector<std::size_t> fives(3, 5);
  EXPECT_EQ(completed(calls::all_gather(const_floats(5), floats(15))).counts, fives);
  EXPECT_EQ(completed(calls::gather(const_floats(5), floats(15), 0)).counts, fives);
  EXPECT_EQ(completed(calls::scatter(const_floats(15), floats(5), 0)).counts, fives);
  const Call call = completed(calls::all_to_all(const_floats(15), floats(15)));
  EXPECT_EQ(call.counts, fives);
  EXPECT_EQ(call.recv_counts, fives);
}

TEST(Calls, EvenPiecesOfAReductionMayDifferByOne) {
  for (int rank = 0; rank < 3; ++rank) {
    const std::size_t own = rank == 0 ? 4 : 3;
    completed(calls::reduce_scatter(const_floats(10), floats(own), ReduceOp::kSum), rank);
    expect_refused(calls::reduce_scatter(const_floats(10), floats(own + 1), ReduceOp::kSum),
                   ErrorCode::kSizeMismatch, "are needed", rank);
  }
}

TEST(Calls, SizesMustFit) {
  const auto bad = ErrorCode::kSizeMismatch;
  const auto sum = ReduceOp::kSum;
  expect_refused(calls::reduce(const_floats(10), floats(9), sum, 0), bad,
                 "9 elements, 10 are needed");
  expect_refused(calls::all_gather(const_floats(5), floats(14)), bad, "14 elements, 15 are needed");
  expect_refused(calls::all_gather(const_floats(5), floats(12), {4, 4, 4}), bad, "the input");
  expect_refused(calls::gather(const_floats(5), floats(14), 0), bad, "14 elements");
  expect_refused(calls::scatter(const_floats(14), floats(5), 0), bad, "14 elements");
  expect_refused(calls::reduce_scatter(const_floats(10), floats(4), sum, {4, 4, 4}), bad, "12");
  expect_refused(calls::all_to_all(const_floats(14), floats(15)), bad, "the input");
  expect_refused(calls::all_to_all(const_floats(6), floats(6), {1, 2, 3}, {2, 2, 2}), bad,
                 "own part");
}

// What only the root uses may be anything elsewhere.
TEST(Calls, TheRootsBuffersAreNobodyElsesConcern) {
  completed(calls::reduce(const_floats(10), floats(0), ReduceOp::kSum, 0), 1);
  completed(calls::gather(const_floats(5), floats(0), 0), 1);
  completed(calls::scatter(const_floats(0), floats(5), 0), 1);
}

TEST(Calls, RanksAndListsMustFit) {
  const auto bad = ErrorCode::kInvalidArgument;
  const auto sum = ReduceOp::kSum;
  for (const int root : {-1, 3}) {
    expect_refused(calls::broadcast(floats(1), root), ErrorCode::kInvalidRank,
                   "root " + std::to_string(root));
  }
  expect_refused(calls::reduce_scatter(const_floats(2), floats(1), sum, {1, 1}), bad,
                 "2 counts for 3 ranks");
  expect_refused(calls::all_to_all(const_floats(3), floats(3), {}, {1, 2}), bad, "2 counts");
  double wide[3];
  expect_refused(calls::reduce(const_floats(3), BufferView(wide, 3, DataType::kF64), sum, 0), bad,
                 "input is f32, output is f64");
}

TEST(Calls, PartialsMustBeThoseOfTheRanksNodes) {
  const LeafOwners owners{0, 0, 1, 2};
  const auto nodes = [&](std::vector<ConstBufferView> partials, LeafOwners who) {
    return calls::reduce_nodes(std::move(partials), std::move(who), floats(5));
  };
  completed(nodes({const_floats(5)}, owners));
  expect_refused(nodes({}, owners), ErrorCode::kInvalidArgument, "owns 1 nodes");
  expect_refused(nodes({const_floats(4)}, owners), ErrorCode::kSizeMismatch, "a partial");
  expect_refused(nodes({const_floats(5)}, {0, 1}), ErrorCode::kInvalidArgument,
                 "2 lanes for 3 ranks");
  expect_refused(nodes({const_floats(5)}, {0, 1, 2, 3}), ErrorCode::kInvalidRank, "rank 3");
  expect_refused(nodes({ConstBufferView(memory, 5, DataType::kI32)}, owners),
                 ErrorCode::kInvalidArgument, "another type");
  expect_refused(calls::reduce_scatter_nodes({const_floats(5)}, owners, floats(2), {2, 3}),
                 ErrorCode::kInvalidArgument, "2 counts");
  expect_refused(calls::reduce_scatter_nodes({const_floats(5)}, owners, floats(2), {}),
                 ErrorCode::kSizeMismatch, "counts");
}

TEST(CallStamp, TellsCallsApart) {
  const auto sum = ReduceOp::kSum;
  const auto stamp = [](Call call, int rank = 0) { return stamp_of(completed(call, rank)); };
  const MeshFrame usual = stamp(calls::all_reduce(floats(10), sum));
  EXPECT_EQ(stamp(calls::all_reduce(floats(10), sum), 2), usual);
  EXPECT_NE(stamp(calls::all_reduce(floats(11), sum)), usual);
  EXPECT_NE(stamp(calls::all_reduce(floats(10), ReduceOp::kMean)), usual);
  EXPECT_NE(stamp(calls::broadcast(floats(10), 0)), usual);
  EXPECT_NE(stamp(calls::all_reduce({memory, 10, DataType::kI32}, sum)), usual);
  EXPECT_NE(stamp(calls::broadcast(floats(10), 0)), stamp(calls::broadcast(floats(10), 1)));
  const auto scattered = [&](std::vector<std::size_t> counts, int rank) {
    const std::size_t own = counts[static_cast<std::size_t>(rank)];
    return stamp(calls::reduce_scatter(const_floats(6), floats(own), sum, counts), rank);
  };
  EXPECT_EQ(scattered({1, 2, 3}, 0), scattered({1, 2, 3}, 2));
  EXPECT_NE(scattered({1, 2, 3}, 0), scattered({3, 2, 1}, 0));
  // The same chunks, whether said or not.
  EXPECT_EQ(scattered({2, 2, 2}, 0), stamp(calls::reduce_scatter(const_floats(6), floats(2), sum)));
}

// Every rank has its own chunk, and all call the same.
TEST(CallStamp, IsEqualOnAllRanks) {
  const LeafOwners owners{0, 0, 1, 2};
  std::vector<MeshFrame> stamps;
  for (int rank = 0; rank < 3; ++rank) {
    const std::vector<ConstBufferView> partials{const_floats(6)};
    const std::vector<std::size_t> counts{1, 2, 3};
    const std::size_t own = counts[static_cast<std::size_t>(rank)];
    stamps.push_back(stamp_of(
        completed(calls::reduce_scatter_nodes(partials, owners, floats(own), counts), rank)));
  }
  EXPECT_EQ(stamps[0], stamps[1]);
  EXPECT_EQ(stamps[0], stamps[2]);
  EXPECT_EQ(stamps[0].count, 6U);
}

TEST(CallStamp, IsDescribedInWords) {
  CallOptions options;
  options.algorithm = Algorithm::kDirect;
  options.step = 3;
  options.bucket = 2;
  EXPECT_EQ(describe(stamp_of(completed(calls::all_reduce(floats(10), ReduceOp::kSum, options)))),
            "all_reduce sum f32 x 10 (direct), step 3, bucket 2");
  EXPECT_EQ(describe(stamp_of(completed(calls::broadcast(floats(10), 0)))),
            "broadcast f32 x 10, root 0 (auto)");
  EXPECT_EQ(describe(stamp_of(completed(calls::gather(const_floats(5), floats(0), 2)))),
            "gather f32 x 15, root 2 (auto)");
  EXPECT_EQ(describe(stamp_of(completed(calls::barrier()))), "barrier");
  EXPECT_THAT(describe(stamp_of(completed(calls::all_gather(const_floats(1), floats(6),
                                                            std::vector<std::size_t>{1, 2, 3})))),
              HasSubstr("all_gather f32 x 6, shape "));
}

TEST(RunAlone, CopiesAndLooks) {
  std::vector<float> in{1, 2, std::numeric_limits<float>::infinity(), 4};
  std::vector<float> out(4);
  Call call = calls::reduce(std::span<const float>(in), std::span(out), ReduceOp::kMean, 0);
  call.options.check_finite = true;
  EXPECT_EQ(run_alone(completed(call, 0, 1)).first_non_finite, 2U);
  EXPECT_EQ(out, in);
  call.options.check_finite = false;
  EXPECT_FALSE(run_alone(completed(call, 0, 1)).first_non_finite);
}

TEST(RunAlone, LanesAreAveraged) {
  const std::vector<float> sum{10, 20};
  std::vector<float> out(2);
  Call call =
      calls::reduce_nodes({std::span(sum)}, {0, 0, 0, 0, 0}, std::span(out), ReduceOp::kMean);
  run_alone(completed(call, 0, 1));
  EXPECT_EQ(out, (std::vector<float>{10 * 0.2F, 20 * 0.2F}));
}

}  // namespace
}  // namespace lockstep::call_test
