#include "lockstep/run/thread_meeting.h"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"

namespace lockstep::thread_meeting_test {
namespace {

using namespace std::chrono_literals;
using Departed = std::vector<ThreadMeeting::Departed>;

TEST(ThreadMeeting, WhoComesTooLateBreaksNobody) {
  ThreadMeeting meeting(3);
  meeting.leave(0, 0, "");
  const auto alone = meeting.regroup(2, Deadline::after(0s));
  ASSERT_TRUE(alone.transport);
  EXPECT_EQ(alone.transport->world_size(), 1);
  EXPECT_EQ(alone.departed, (Departed{{0, ""}, {1, "it did not come in time", true}}));
  try {
    meeting.regroup(1, Deadline::after(0s));
    ADD_FAILURE() << "it is in a group";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout);
    EXPECT_EQ(error.rank(), 1);
  }
  meeting.leave(1, 1, "stuck");  // as told before
  const auto again = meeting.regroup(2, Deadline::after(60s));
  ASSERT_TRUE(again.transport);
  EXPECT_EQ(again.generation, 3U);
  EXPECT_EQ(again.departed, Departed());
}

}  // namespace
}  // namespace lockstep::thread_meeting_test
