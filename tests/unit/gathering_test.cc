#include "lockstep/net/job/gathering.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/net/job/reach.h"
#include "lockstep/net/job/roster.h"

namespace lockstep::gathering_test {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

const Gathering::Time kStart{};

Card make_card(int rank, int world_size = 3) {
  Card card;
  card.rank = rank;
  card.world_size = world_size;
  card.version = "1.0";
  card.pid = 100 + rank;
  card.host = {"node" + std::to_string(rank), "boot", 1};
  card.mesh_address = "127.0.0.1:" + std::to_string(5000 + rank);
  return card;
}

TEST(Gathering, IsCompleteWhenAllAreThereInAnyOrder) {
  Gathering gathering(3, "1.0", kStart + 10s);
  for (const int rank : {2, 0, 1}) {
    EXPECT_FALSE(gathering.complete());
    EXPECT_FALSE(gathering.add(make_card(rank), kStart + 10s));
  }
  ASSERT_TRUE(gathering.complete());
  const Roster roster = gathering.roster();
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(roster[rank], make_card(rank));
}

TEST(Gathering, NamesARankTakenTwice) {
  Gathering gathering(3, "1.0", kStart);
  EXPECT_FALSE(gathering.add(make_card(1), kStart));
  Card second = make_card(1);
  second.host.hostname = "other";
  second.pid = 999;
  const auto error = gathering.add(second, kStart);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ErrorCode::kInvalidRank);
  EXPECT_EQ(error->rank(), 1);
  EXPECT_THAT(error->what(), HasSubstr("node1, pid 101"));
  EXPECT_THAT(error->what(), HasSubstr("other, pid 999"));
}

TEST(Gathering, NamesWhatDoesNotFit) {
  Gathering gathering(3, "1.0", kStart);
  const auto size = gathering.add(make_card(1, 8), kStart);
  ASSERT_TRUE(size);
  EXPECT_EQ(size->code(), ErrorCode::kInvalidWorldSize);
  EXPECT_THAT(size->what(), HasSubstr("a world of 8, the rendezvous for 3"));

  for (const int rank : {-2, 3, 1 << 30}) {
    const auto range = gathering.add(make_card(rank), kStart);
    ASSERT_TRUE(range);
    EXPECT_EQ(range->code(), ErrorCode::kInvalidRank);
    EXPECT_THAT(range->what(), HasSubstr("ranks 0 to 2"));
  }

  Card old = make_card(2);
  old.version = "0.9";
  const auto version = gathering.add(old, kStart);
  ASSERT_TRUE(version);
  EXPECT_EQ(version->code(), ErrorCode::kVersionMismatch);
  EXPECT_THAT(version->what(), HasSubstr("0.9"));
  EXPECT_THAT(version->what(), HasSubstr("1.0"));

  Card nowhere = make_card(2);
  nowhere.mesh_address = "node2:5";
  EXPECT_TRUE(gathering.add(nowhere, kStart));
}

TEST(Gathering, NamesTheMissing) {
  Gathering gathering(3, "1.0", kStart);
  EXPECT_FALSE(gathering.add(make_card(1), kStart));
  const Error error = gathering.missing();
  EXPECT_EQ(error.code(), ErrorCode::kTimeout);
  EXPECT_EQ(error.rank(), 0);
  EXPECT_THAT(error.what(), HasSubstr("2 of 3 ranks"));
  EXPECT_THAT(error.what(), HasSubstr("rank 0, rank 2"));
}

TEST(Gathering, NamesAtMostTwentyMissing) {
  Gathering gathering(1000, "1.0", kStart);
  EXPECT_THAT(gathering.missing().what(), HasSubstr("rank 19, and 980 more"));
}

TEST(Gathering, LetsAnotherTakeThePlaceOfOneThatWentAway) {
  Gathering gathering(2, "1.0", kStart);
  EXPECT_FALSE(gathering.add(make_card(1, 2), kStart));
  gathering.forget(make_card(1, 2));
  EXPECT_THAT(gathering.missing().what(),
              HasSubstr("rank 1 (node1, pid 101), which came and went"));
  EXPECT_FALSE(gathering.add(make_card(1, 2), kStart));
  EXPECT_FALSE(gathering.add(make_card(0, 2), kStart));
  EXPECT_TRUE(gathering.complete());
}

// A member that asks for no rank; `host` and its id tell it apart.
Card make_nameless(int host) {
  Card card = make_card(host, 0);
  card.rank = -1;
  card.id.fill(static_cast<std::byte>(host));
  return card;
}

TEST(Gathering, GivesTheRanksThatAreLeftInTheOrderOfComing) {
  Gathering gathering(4, "1.0", kStart);
  EXPECT_FALSE(gathering.add(make_nameless(7), kStart));
  EXPECT_FALSE(gathering.add(make_card(1, 4), kStart));
  EXPECT_FALSE(gathering.add(make_nameless(9), kStart));
  EXPECT_FALSE(gathering.add(make_nameless(8), kStart));
  ASSERT_TRUE(gathering.complete());
  const Roster roster = gathering.roster();
  std::vector<std::string> hosts;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(roster[rank].rank, rank);
    EXPECT_EQ(roster[rank].world_size, 4);
    hosts.push_back(roster[rank].host.hostname);
  }
  EXPECT_EQ(hosts, (std::vector<std::string>{"node7", "node1", "node9", "node8"}));
}

TEST(Gathering, ForgetsAMemberWithoutARankById) {
  Gathering gathering(2, "1.0", kStart);
  EXPECT_FALSE(gathering.add(make_nameless(1), kStart));
  gathering.forget(make_nameless(2));
  gathering.forget(make_nameless(1));
  EXPECT_FALSE(gathering.add(make_nameless(2), kStart));
  EXPECT_FALSE(gathering.complete());
  EXPECT_THAT(gathering.missing().what(),
              HasSubstr("1 of 2 ranks did not come to the rendezvous in time; here are a rank "
                        "(node2, pid 102)"));
}

TEST(Gathering, EndsWhenTheFirstRankGivesUp) {
  Gathering gathering(3, "1.0", kStart + 10s);
  EXPECT_FALSE(gathering.add(make_card(1), kStart + 5s));
  EXPECT_FALSE(gathering.add(make_card(2), kStart + 20s));
  EXPECT_EQ(gathering.deadline(), kStart + 5s);
}

TEST(CheckReachable, LoopbackServesOneHostOnly) {
  Roster roster = {make_card(0), make_card(1), make_card(2)};
  EXPECT_FALSE(check_reachable(roster));
  roster[2].host.network_namespace = 2;
  const auto error = check_reachable(roster);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->rank(), 0);
  EXPECT_THAT(error->what(), HasSubstr("--interface"));
  EXPECT_THAT(error->what(), HasSubstr("rank 2 (node2, pid 102)"));
  roster[0].mesh_address = roster[1].mesh_address = "10.0.0.1:1";
  EXPECT_EQ(check_reachable(roster)->rank(), 2);
  roster[2].mesh_address = "10.0.0.2:1";
  EXPECT_FALSE(check_reachable(roster));
}

TEST(FingerprintWarning, NamesThoseThatDiffer) {
  Roster roster = {make_card(0), make_card(1), make_card(2)};
  EXPECT_EQ(fingerprint_warning(roster), "");
  roster[1].fingerprint = "aarch64";
  const std::string warning = fingerprint_warning(roster);
  EXPECT_THAT(warning, HasSubstr("rank 1 (node1, pid 101): aarch64"));
  EXPECT_EQ(warning.find("rank 2"), std::string::npos);
}

TEST(CoresForEach, CountsCoresOfRanksOnTheSameHostOnce) {
  Roster roster = {make_card(0), make_card(1), make_card(2)};
  roster[2].host.network_namespace = 2;  // another host
  roster[0].cores = "0-1";
  roster[1].cores = "0-1";
  roster[2].cores = "7";
  EXPECT_EQ(cores_for_each(roster, 0), 1);
  roster[1].cores = "2-3";
  EXPECT_EQ(cores_for_each(roster, 1), 2);
  EXPECT_EQ(cores_for_each(roster, 2), 1);
  EXPECT_EQ(least_cores_for_each(roster), 1);
  roster[2].cores = "4-15";
  EXPECT_EQ(least_cores_for_each(roster), 2);
  roster[0].cores = roster[1].cores = "0";
  EXPECT_EQ(cores_for_each(roster, 0), 0);
  EXPECT_EQ(least_cores_for_each(roster), 0);
}

TEST(RequireMember, ComparesTheProcessWithTheRoster) {
  Roster roster = {make_card(0, 2), make_card(1, 2)};
  roster[1].id = random_member_id();
  EXPECT_TRUE(is_member(roster, {roster[1].id, 1, 0}));
  EXPECT_FALSE(is_member(roster, {roster[1].id, 0, 0}));
  EXPECT_FALSE(is_member(roster, {random_member_id(), 1, 0}));
  EXPECT_FALSE(is_member(roster, {roster[1].id, 2, 0}));
  EXPECT_FALSE(is_member(roster, {roster[1].id, -1, 0}));
}

}  // namespace
}  // namespace lockstep::gathering_test
