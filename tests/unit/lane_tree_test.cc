#include "lockstep/server/lane_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "lockstep/base/random.h"
#include "lockstep/server/lane_sums.h"
#include "tests/support/ranks.h"

namespace lockstep::lane_tree_test {
namespace {

using ::testing::HasSubstr;
using namespace test;

LaneValue leaf(std::size_t lane) {
  LaneValue value;
  for (std::uint64_t i = 0; i < 17; ++i) value.data.push_back(random_f32(3, lane, i) - 0.5F);
  value.tail = {static_cast<double>(random_f32(4, lane, 0)), 1.0};
  return value;
}

// T(begin, end), as it is defined.
LaneValue reference(std::size_t begin, std::size_t end) {
  if (end - begin == 1) return leaf(begin);
  const std::size_t middle = begin + tree_split(end - begin);
  LaneValue left = reference(begin, middle);
  const LaneValue right = reference(middle, end);
  for (std::size_t i = 0; i < left.data.size(); ++i) left.data[i] += right.data[i];
  for (std::size_t i = 0; i < left.tail.size(); ++i) left.tail[i] += right.tail[i];
  return left;
}

TEST(LaneTree, AnyOwnershipAndAnyOrderGiveTheSameBits) {
  std::mt19937 random(5);
  for (const std::uint32_t lanes : {1U, 2U, 3U, 7U, 8U, 13U, 32U, 45U}) {
    const LaneValue expected = reference(0, lanes);
    for (int trial = 0; trial < 10; ++trial) {
      LeafOwners owners(lanes);
      for (int& owner : owners) owner = static_cast<int>(random() % 4);  // not even contiguous
      auto nodes = maximal_nodes(owners);
      std::ranges::shuffle(nodes, random);
      LaneTree tree(lanes);
      for (const Range& node : nodes) {
        EXPECT_FALSE(tree.complete());
        ASSERT_EQ(tree.add(node, reference(node.begin, node.end)), LaneTree::Outcome::kAdded);
      }
      ASSERT_TRUE(tree.complete());
      const LaneValue got = tree.take();
      EXPECT_EQ(got.data, expected.data);
      EXPECT_EQ(got.tail, expected.tail);
    }
  }
}

TEST(LaneTree, RefusesWhatIsNoNodeAndWhatHasCome) {
  LaneTree tree(6);  // T(0,6) = T(0,4) + T(4,6)
  EXPECT_EQ(tree.add({1, 3}, leaf(0)), LaneTree::Outcome::kNoNode);
  EXPECT_EQ(tree.add({2, 6}, leaf(0)), LaneTree::Outcome::kNoNode);
  EXPECT_EQ(tree.add({4, 7}, leaf(0)), LaneTree::Outcome::kNoNode);
  EXPECT_EQ(tree.add({2, 3}, leaf(2)), LaneTree::Outcome::kAdded);
  EXPECT_EQ(tree.add({2, 3}, leaf(2)), LaneTree::Outcome::kOverlaps);
  EXPECT_EQ(tree.add({2, 4}, leaf(2)), LaneTree::Outcome::kOverlaps);
  EXPECT_EQ(tree.add({0, 4}, leaf(2)), LaneTree::Outcome::kOverlaps);
  EXPECT_EQ(tree.first_gap(), (Range{0, 2}));
  EXPECT_EQ(tree.add({3, 4}, leaf(3)), LaneTree::Outcome::kAdded);
  EXPECT_EQ(tree.add({3, 4}, leaf(3)), LaneTree::Outcome::kOverlaps);  // now part of [2, 4)
}

BulkHead partial(std::uint64_t offset, Range node, std::uint32_t tail = 0) {
  BulkHead head;
  head.tag = WireTag::kPartialSum;
  head.step = 0;
  head.offset = offset;
  head.lanes = 4;
  head.lane_begin = static_cast<std::uint32_t>(node.begin);
  head.lane_end = static_cast<std::uint32_t>(node.end);
  head.count = 2;
  head.tail_count = tail;
  return head;
}

TEST(LaneSums, FinishesPieceAfterPiece) {
  LaneSums step({"a", "b"});
  ASSERT_TRUE(step.offer(0, partial(0, {0, 2})));
  step.add(0, partial(0, {0, 2}), {{1, 2}, {}});
  EXPECT_FALSE(step.take_finished());
  EXPECT_FALSE(step.offer(0, partial(2, {0, 2}, 1)));  // a is ahead and has to wait
  EXPECT_THAT(step.missing(), HasSubstr("lanes [2, 4)"));
  ASSERT_TRUE(step.offer(1, partial(0, {2, 4})));
  step.add(1, partial(0, {2, 4}), {{10, 20}, {}});
  auto piece = step.take_finished();
  ASSERT_TRUE(piece);
  EXPECT_EQ(piece->sum.data, (std::vector<float>{11, 22}));
  EXPECT_EQ(piece->head.tag, WireTag::kRawSum);

  ASSERT_TRUE(step.offer(0, partial(2, {0, 4}, 1)));
  step.add(0, partial(2, {0, 4}, 1), {{5, 6}, {7}});
  piece = step.take_finished();
  ASSERT_TRUE(piece);
  EXPECT_EQ(piece->sum.tail, std::vector<double>{7});
}

TEST(LaneSums, RanksNumberTheirSums) {
  LaneSums sums({"a", "b"});
  const auto at = [](std::uint64_t step, Range node) {
    BulkHead head = partial(0, node);
    head.step = step;
    head.call = 100 + step;
    return head;
  };
  for (const std::uint64_t step : {0, 1}) {
    ASSERT_TRUE(sums.offer(0, at(step, {0, 2})));
    sums.add(0, at(step, {0, 2}), {{1, 2}, {}});
    ASSERT_TRUE(sums.offer(1, at(step, {2, 4})));
    sums.add(1, at(step, {2, 4}), {{10, 20}, {}});
    const auto piece = sums.take_finished();
    ASSERT_TRUE(piece);
    EXPECT_EQ(piece->head.step, step);
    EXPECT_EQ(piece->head.call, 100 + step);
  }
  ASSERT_TRUE(sums.offer(0, at(2, {0, 2})));
  EXPECT_EQ(error_of([&] { sums.offer(1, at(1, {2, 4})); }).code(), ErrorCode::kStepMismatch);
  BulkHead other = at(2, {2, 4});
  other.call = 1;
  const Error error = error_of([&] { sums.offer(1, other); });
  EXPECT_EQ(error.code(), ErrorCode::kCollectiveMismatch);
  EXPECT_EQ(error.rank(), 1);
  EXPECT_THAT(error.what(), HasSubstr("b is in another collective than a"));
}

// Whoever comes first does not decide what the others should have sent.
TEST(LaneSums, NamesWhoSendsOutOfOrder) {
  const auto at = [](std::uint64_t step, std::uint64_t offset, Range node, std::uint32_t tail = 0) {
    BulkHead head = partial(offset, node, tail);
    head.step = step;
    return head;
  };
  const auto blamed = [&](LaneSums& sums, int rank, const BulkHead& head) {
    const Error error = error_of([&] { sums.offer(rank, head); });
    EXPECT_EQ(error.code(), ErrorCode::kStepMismatch) << error.what();
    return error.rank();
  };
  {  // the first of all
    LaneSums sums({"a", "b"});
    EXPECT_EQ(blamed(sums, 1, at(1, 0, {0, 2})), 1);
    EXPECT_EQ(blamed(sums, 1, at(0, 2, {0, 2})), 1);
    EXPECT_TRUE(sums.offer(0, at(0, 0, {0, 2})));  // the honest one goes on
    EXPECT_EQ(blamed(sums, 1, at(1, 0, {2, 4})), 1);
    EXPECT_EQ(blamed(sums, 1, at(0, 2, {2, 4})), 1);  // its part of the open piece is missing
    EXPECT_EQ(blamed(sums, 0, at(0, 4, {0, 2})), 0);  // one was left out
    EXPECT_FALSE(sums.offer(0, at(0, 2, {0, 2})));    // ahead
  }
  LaneSums sums({"a", "b"});
  const auto finish = [&](const BulkHead& head) {
    ASSERT_TRUE(sums.offer(0, head));
    sums.add(0, head, {{1, 2}, std::vector<double>(head.tail_count)});
    ASSERT_TRUE(sums.take_finished());
  };
  finish(at(0, 0, {0, 4}, 1));  // with its tail the sum is over
  EXPECT_EQ(blamed(sums, 0, at(0, 2, {0, 2})), 0);
  EXPECT_EQ(blamed(sums, 0, at(2, 0, {0, 2})), 0);
  finish(at(1, 0, {0, 4}));  // without one, nobody but the ranks knows
  ASSERT_TRUE(sums.offer(1, at(2, 0, {0, 2})));
  EXPECT_EQ(blamed(sums, 0, at(3, 0, {0, 2})), 0);
  EXPECT_EQ(blamed(sums, 0, at(1, 2, {0, 2})), -1);
}

// A rank may say that it brings lanes, and others bring them all before it has.
TEST(LaneSums, NamesWhoBringsLanesOfAFinishedPiece) {
  LaneSums sums({"a", "b"});
  ASSERT_TRUE(sums.offer(1, partial(0, {0, 2})));
  ASSERT_TRUE(sums.offer(0, partial(0, {0, 4})));
  sums.add(0, partial(0, {0, 4}), {{1, 2}, {}});
  ASSERT_TRUE(sums.take_finished());
  Error error = error_of([&] { sums.add(1, partial(0, {0, 2}), {{1, 2}, {}}); });
  EXPECT_EQ(error.rank(), 1);
  EXPECT_THAT(error.what(), HasSubstr("others have sent all lanes already"));
  // The same where the next piece is open by now.
  auto next = partial(2, {0, 2});
  next.count = 1;
  ASSERT_TRUE(sums.offer(0, next));
  error = error_of([&] { sums.add(1, partial(0, {0, 2}), {{1, 2}, {}}); });
  EXPECT_THAT(error.what(), HasSubstr("others have sent all lanes already"));
}

TEST(LaneSums, BoundsLanesAndBytesOfARank) {
  LaneSums sums({"a", "b"});
  auto many = partial(0, {0, 1});
  for (const std::uint32_t lanes : {std::uint32_t{0}, UINT32_MAX}) {
    many.lanes = lanes;
    const Error error = error_of([&] { sums.offer(1, many); });
    EXPECT_EQ(error.rank(), 1);
    EXPECT_THAT(error.what(), HasSubstr("b counts"));
  }
  many.lanes = 1 << 20;
  many.count = 1 << 20;  // 4 MiB, the most at once
  const auto bring = [&] {
    for (std::uint32_t lane = 0; lane < 1000; ++lane) {
      many.lane_begin = lane;
      many.lane_end = lane + 1;
      sums.offer(1, many);
    }
  };
  const Error error = error_of(bring);
  EXPECT_EQ(error.code(), ErrorCode::kMessageTooLarge);
  EXPECT_EQ(error.rank(), 1);
}

// Nodes of nothing take memory, too: of every other lane, so that none has its sibling.
TEST(LaneSums, BoundsNodesThatBringNothing) {
  LaneSums sums({"a", "b"});
  auto empty = partial(0, {0, 1});
  empty.lanes = 1 << 24;
  empty.count = 0;
  const Error error = error_of([&] {
    for (std::uint32_t lane = 0; lane < empty.lanes; lane += 2) {
      empty.lane_begin = lane;
      empty.lane_end = lane + 1;
      sums.offer(1, empty);
    }
  });
  EXPECT_EQ(error.code(), ErrorCode::kMessageTooLarge);
  EXPECT_EQ(error.rank(), 1);
}

TEST(LaneSums, NamesWhoDoesNotFit) {
  const auto failure = [](auto&& body) {
    LaneSums step({"a", "b"});
    EXPECT_TRUE(step.offer(0, partial(0, {0, 2})));
    step.add(0, partial(0, {0, 2}), {{1, 2}, {}});
    return error_of([&] { body(step); });
  };
  auto other = partial(0, {2, 4});
  other.step = 2;
  Error error = failure([&](LaneSums& step) { step.offer(1, other); });
  EXPECT_EQ(error.code(), ErrorCode::kStepMismatch);
  EXPECT_EQ(error.rank(), 1);
  other = partial(0, {2, 4});
  other.lanes = 5;
  error = failure([&](LaneSums& step) { step.offer(1, other); });
  EXPECT_THAT(error.what(), HasSubstr("b counts 5 lanes in sum 0, but a counts 4"));
  other = partial(0, {2, 4});
  other.count = 3;
  error = failure([&](LaneSums& step) { step.offer(1, other); });
  EXPECT_THAT(error.what(), HasSubstr("b sent 3 elements and a tail of 0 from element 0 on in sum "
                                      "0, but a sent 2 and 0"));
  error = failure([&](LaneSums& step) { step.add(1, partial(0, {1, 2}), {{1, 2}, {}}); });
  EXPECT_THAT(error.what(), HasSubstr("b sent lanes [1, 2) of 4 in sum 0, of which a has brought "
                                      "some already"));
  error = failure([&](LaneSums& step) { step.add(1, partial(0, {2, 4}), {{1, NAN}, {}}); });
  EXPECT_EQ(error.code(), ErrorCode::kNonFinite);
  EXPECT_THAT(error.what(), HasSubstr("b sent nan for lanes [2, 4) of 4 in sum 0: element 1"));
  error = failure([&](LaneSums& step) {
    EXPECT_FALSE(step.offer(0, partial(2, {0, 2})));
    step.check_stuck();  // not yet
    EXPECT_TRUE(step.offer(1, partial(0, {2, 3})));
    step.add(1, partial(0, {2, 3}), {{1, 2}, {}});
    EXPECT_FALSE(step.offer(1, partial(2, {2, 3})));
    step.check_stuck();
  });
  EXPECT_THAT(error.what(), HasSubstr("can never come"));
}

}  // namespace
}  // namespace lockstep::lane_tree_test
