#include "lockstep/comm/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/groups.h"
#include "tests/support/ranks.h"

namespace lockstep::communicator_test {
namespace {

using test::error_of;
using ::testing::HasSubstr;

TEST(Communicator, CheckThrowsTheCauseOnEveryRankOnceTheJobHasFailed) {
  test::Group group({.world_size = 2, .faults = {}});
  EXPECT_NO_THROW(group[0].check());
  group[1].abort("enough");
  for (const int rank : {0, 1}) {
    const Error error = error_of([&] { group[rank].check(); });
    EXPECT_EQ(error.code(), ErrorCode::kAborted);
    EXPECT_EQ(error.rank(), 1);
    EXPECT_THAT(error.what(), HasSubstr("enough"));
  }
}

TEST(Communicator, AReportedFailureEndsTheJobUnlessItHasFailedBefore) {
  test::Group group({.world_size = 2, .faults = {}});
  const Error first(ErrorCode::kIo, "the card is broken", 1);
  EXPECT_EQ(error_of([&] { group[1].fail(first); }).code(), ErrorCode::kIo);
  const Error later(ErrorCode::kTimeout, "nothing came", 0);
  for (const Error& error :
       {error_of([&] { group[0].check(); }), error_of([&] { group[0].fail(later); }),
        error_of([&] { group[0].barrier(); })}) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.what(), HasSubstr("the card is broken"));
  }
}

TEST(Communicator, AThreadThatRunsOutOfMemoryTellsAllRanksSo) {
  test::GroupOptions options{
      .medium = test::GroupMedium::kLocalMessages, .world_size = 2, .faults = {{}, {}}};
  options.faults[1].exhaust_at = 0;
  test::Group group(options);
  std::vector<float> values[2] = {std::vector<float>(1000), std::vector<float>(1000)};
  Work works[2];
  for (const int rank : {0, 1}) {
    works[rank] = group[rank].start(calls::all_reduce(std::span(values[rank]), ReduceOp::kSum));
  }
  for (Work& work : works) {
    const Error error = error_of([&] { work.wait(Deadline::after(std::chrono::seconds(30))); });
    EXPECT_THAT(error.what(), HasSubstr("the communication thread failed: std::bad_alloc"));
  }
}

}  // namespace
}  // namespace lockstep::communicator_test
