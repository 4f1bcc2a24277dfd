#include "lockstep/net/job/member.h"

#include <gtest/gtest.h>

namespace lockstep::member_test {
namespace {

using namespace std::chrono_literals;

constexpr auto kTimeout = 10s;  // heartbeats are sent every two seconds
constexpr Member::Time kBegin{};

RosterMessage news_of(std::uint32_t generation) {
  Roster roster(2);
  for (int rank = 0; rank < 2; ++rank) {
    Card& card = roster[static_cast<std::size_t>(rank)];
    card.rank = rank;
    card.world_size = 2;
    card.id.fill(static_cast<std::byte>(rank + 1));
  }
  return {.centre = {.rank = 0, .title = "", .hostname = "a", .pid = 1},
          .timeout = kTimeout,
          .generation = {.number = generation, .id = {}},
          .survives = true,
          .roster = roster};
}

// The second of two ranks; its first heartbeat is sent at kBegin.
Member joined_member() {
  const RosterMessage news = news_of(1);
  Member member(
      {.card = news.roster[1], .patience = 10 * kTimeout, .survives = true},
      [] { return std::vector<Progress>{}; }, kBegin);
  member.received({MessageKind::kRoster, encode(news)}, kBegin);
  member.tick(kBegin);
  return member;
}

void hear_end(Member& member, std::uint32_t generation, int lost, Member::Time now) {
  const Error why(ErrorCode::kPeerLost, "it was lost", lost);
  const std::uint32_t tag = tag_of(news_of(generation).generation);
  member.received({MessageKind::kEnd, encode(GenerationEnd{tag, why})}, now);
}

void hear_heartbeat(Member& member, std::uint32_t generation, Member::Time now) {
  const std::uint32_t tag = tag_of(news_of(generation).generation);
  member.received({MessageKind::kHeartbeat, encode(Pulse{tag, {}})}, now);
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

// The clock stands still while a machine is suspended.
TEST(Member, WhoseMachineWasSuspendedHasStoodStill) {
  for (const auto slept : {8s, 12s}) {
    Member member = joined_member();
    ASSERT_TRUE(member.joined());
    member.tick(kBegin + 1s);
    member.machine_slept(slept);
    hear_heartbeat(member, 1, kBegin + 1s);
    member.tick(kBegin + 1s);
    EXPECT_EQ(member.paused(), slept >= kTimeout);
  }
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

// It asked for the next generation before it was stopped. The roster was sent meanwhile, and so was
// the news that this generation had ended, too.
TEST(Member, ARosterThatCameInAPauseDoesNotEndIt) {
  Member member = joined_member();
  hear_end(member, 1, 0, kBegin + 1s);
  member.join_again(Standing::kBroken, 3, kBegin + 1s);
  member.tick(kBegin + 1s);
  const auto woke = kBegin + 15s;
  member.received({MessageKind::kRoster, encode(news_of(2))}, woke);
  hear_heartbeat(member, 2, woke);
  member.tick(woke);
  EXPECT_TRUE(member.paused());
  // It is still in the generation: the centre goes on to say so.
  hear_heartbeat(member, 2, woke + 2s);
  member.tick(woke + 2s);
  EXPECT_FALSE(member.paused());
}

TEST(Member, HearsThatItIsLostThoughTheGenerationEndedBefore) {
  Member member = joined_member();
  hear_end(member, 1, 0, kBegin + 1s);
  EXPECT_FALSE(member.paused());
  hear_end(member, 1, 1, kBegin + 1s);
  EXPECT_TRUE(member.paused());
  EXPECT_EQ(member.ended()->rank(), 0);  // the first cause stays
}

// A spare waits for a member to go, which may take as long as the run.
TEST(Member, ASpareWaitsForAsLongAsItsCentreIsHeard) {
  Card card;
  card.rank = -1;
  card.id.fill(std::byte{9});
  Member member(
      {.card = card, .patience = 10 * kTimeout, .timeout = kTimeout, .survives = true},
      [] { return std::vector<Progress>{}; }, kBegin);
  member.received({MessageKind::kWelcome, encode(Description{2, {std::byte{1}}})}, kBegin);
  member.join_again(Standing::kPrepared, 0, kBegin);
  EXPECT_FALSE(member.take_spare());
  auto now = kBegin + 1s;
  member.received({MessageKind::kWish, encode(Wish{.stop = kSpare})}, now);
  EXPECT_TRUE(member.take_spare());
  EXPECT_FALSE(member.take_spare());
  EXPECT_EQ(member.wish(), Wish{});
  for (; now < kBegin + 30 * kTimeout; now += 2s) {
    hear_heartbeat(member, 1, now);
    member.tick(now);
  }
  EXPECT_FALSE(member.failure());
  member.tick(now + kTimeout / 3);
  member.tick(now + 2 * kTimeout / 3);
  member.tick(now + kTimeout);
  ASSERT_TRUE(member.failure());
}

TEST(Member, ANewLinkThatLetsItInEndsThePause) {
  const RosterMessage last = news_of(1);
  Member member(
      {.card = last.roster[1],
       .patience = 10 * kTimeout,
       .survives = true,
       .last = last,
       .paused = true},
      [] { return std::vector<Progress>{}; }, kBegin);
  EXPECT_TRUE(member.paused());
  member.received({MessageKind::kRoster, encode(news_of(2))}, kBegin + 1s);
  EXPECT_FALSE(member.paused());
}

}  // namespace
}  // namespace lockstep::member_test
