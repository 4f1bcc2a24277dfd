#include "lockstep/net/job/member.h"

#include <gtest/gtest.h>

namespace lockstep::member_test {
namespace {

using namespace std::chrono_literals;

constexpr auto kTimeout = 10s;  // heartbeats are sent every two seconds
constexpr Member::Time kBegin{};

// The second of two ranks; its first heartbeat is sent at kBegin.
Member joined_member() {
  Roster roster(2);
  for (int rank = 0; rank < 2; ++rank) {
    Card& card = roster[static_cast<std::size_t>(rank)];
    card.rank = rank;
    card.world_size = 2;
    card.id.fill(static_cast<std::byte>(rank + 1));
  }
  Member member(
      {.card = roster[1], .patience = kTimeout}, [] { return std::vector<Progress>{}; }, kBegin);
  const RosterMessage news{.centre = {.rank = 0, .title = "", .hostname = "a", .pid = 1},
                           .timeout = kTimeout,
                           .generation = {.number = 1},
                           .roster = roster};
  member.received({MessageKind::kRoster, encode(news)}, kBegin);
  member.tick(kBegin);
  return member;
}

TEST(Member, WhoLooksInTimeHasNotStoodStill) {
  Member member = joined_member();
  ASSERT_TRUE(member.joined());
  member.tick(kBegin + 1900ms);
  member.tick(kBegin + 9900ms);
  EXPECT_FALSE(member.paused());
}

TEST(Member, WhoStoodStillCountsFromItsLastHeartbeat) {
  Member member = joined_member();
  ASSERT_TRUE(member.joined());
  // It looks just before its next heartbeat is due, and is stopped then.
  member.tick(kBegin + 1900ms);
  member.tick(kBegin + 10500ms);
  EXPECT_TRUE(member.paused());
}

TEST(Member, AHeartbeatThatWasSentBeginsTheCountAnew) {
  Member member = joined_member();
  ASSERT_TRUE(member.joined());
  member.tick(kBegin + 2s);
  member.tick(kBegin + 11900ms);
  EXPECT_FALSE(member.paused());
  member.tick(kBegin + 22s);
  EXPECT_TRUE(member.paused());
}

}  // namespace
}  // namespace lockstep::member_test
