#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/doctor/host_checks.h"
#include "lockstep/doctor/link_checks.h"

namespace lockstep::doctor_test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Meeting {
  Socket listener = listen_tcp(SocketAddress::loopback_v4());
  HostPort where{"127.0.0.1", listener.local_address().port()};
};

LinkCheckOptions place(const Meeting& meeting, int rank, int world_size, std::string secret) {
  LinkCheckOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.hub = meeting.where;
  options.secret = std::move(secret);
  options.label = "host " + std::to_string(rank);
  options.findings = {{options.label, "cores", Verdict::kGood, "2"}};
  options.timeout = 20s;
  return options;
}

TEST(Doctor, EveryPairIsMeasuredInBothDirections) {
  Meeting meeting;
  std::vector<std::thread> others;
  for (int rank = 1; rank < 3; ++rank) {
    others.emplace_back([&, rank] { check_links(place(meeting, rank, 3, "")); });
  }
  // Who knows nothing of the protocol is turned away and holds nobody up.
  const Socket stranger =
      connect_tcp(*SocketAddress::parse(to_string(meeting.where)), Deadline::after(5s));
  const std::array<std::byte, 64> junk{std::byte{0xff}, std::byte{0xff}, std::byte{0xff},
                                       std::byte{0xff}};
  stranger.send_all(junk, Deadline::after(5s));
  LinkCheckOptions hub = place(meeting, 0, 3, "");
  hub.listener = std::move(meeting.listener);
  const LinkChecks checks = check_links(std::move(hub));
  for (std::thread& each : others) each.join();
  ASSERT_EQ(checks.links.size(), 6U);
  for (const LinkReport& link : checks.links) {
    EXPECT_THAT(link.error, IsEmpty());
    EXPECT_GT(link.round_trip, 0);
    EXPECT_GT(link.bytes_per_second, 0);
    EXPECT_LT(std::abs(link.clock_ahead), 0.5);
  }
  EXPECT_EQ(checks.labels, (std::vector<std::string>{"host 0", "host 1", "host 2"}));
  EXPECT_EQ(checks.findings.size(), 3 + 6U);
}

TEST(Doctor, NamesWhoHasAnotherTokenAndWhoWillNotCome) {
  Meeting meeting;
  std::atomic<bool> refused = false;
  std::thread wrong([&] {
    EXPECT_THROW(check_links(place(meeting, 1, 3, "another")), Error);
    refused = true;
  });
  LinkCheckOptions hub = place(meeting, 0, 3, "the right one");
  hub.listener = std::move(meeting.listener);
  hub.gone = [&](int rank) -> std::optional<std::string> {
    if (rank == 2) return "host 2 could not be asked";
    if (rank == 1 && refused) return "it gave up";
    return std::nullopt;
  };
  const LinkChecks checks = check_links(std::move(hub));
  wrong.join();
  ASSERT_EQ(worst(checks.findings), Verdict::kBad);
  EXPECT_THAT(checks.links, IsEmpty());
  std::string told;
  for (const Finding& each : checks.findings) told += each.host + ": " + each.found + "\n";
  EXPECT_THAT(told, HasSubstr("rank 2: host 2 could not be asked"));
  EXPECT_THAT(told, HasSubstr("rank 1: it gave up; turned away: "));
  EXPECT_THAT(told, HasSubstr("has another token, or none"));
}

TEST(Doctor, ComparesTheTokensOfHostsThatShareAnotherSecret) {
  Meeting meeting;
  std::vector<std::thread> others;
  for (int rank = 1; rank < 4; ++rank) {
    others.emplace_back([&, rank] {
      LinkCheckOptions options = place(meeting, rank, 4, "of the doctor");
      options.token = rank == 1 ? "the same" : rank == 2 ? "another" : "";
      check_links(std::move(options));
    });
  }
  LinkCheckOptions hub = place(meeting, 0, 4, "of the doctor");
  hub.listener = std::move(meeting.listener);
  hub.token = "the same";
  const LinkChecks checks = check_links(std::move(hub));
  for (std::thread& each : others) each.join();
  std::vector<std::string> bad;
  for (const Finding& each : checks.findings) {
    if (each.verdict == Verdict::kBad) bad.push_back(each.host + " " + each.check);
  }
  EXPECT_EQ(bad, (std::vector<std::string>{"host 2 token"}));
}

TEST(Doctor, ListensToOthersOnlyWithASecret) {
  LinkCheckOptions hub;
  hub.world_size = 2;
  hub.hub = {"0.0.0.0", 0};
  EXPECT_THROW(check_links(std::move(hub)), Error);
}

TEST(Doctor, BetweenHostsATokenIsNeeded) {
  HostCheckOptions options;
  options.host = "a";
  const auto verdict_of = [&](const char* check) {
    for (const Finding& each : check_host(options)) {
      if (each.check == check) return each.verdict;
    }
    return Verdict::kGood;
  };
  EXPECT_EQ(verdict_of("token"), Verdict::kGood);
  options.token = "short";
  EXPECT_EQ(verdict_of("token"), Verdict::kWarning);
  options.several_hosts = true;
  EXPECT_EQ(verdict_of("token"), Verdict::kBad);  // a run would be refused
  options.token.clear();
  EXPECT_EQ(verdict_of("token"), Verdict::kBad);
  options.token = "0123456789abcdef";
  EXPECT_EQ(verdict_of("token"), Verdict::kGood);
}

}  // namespace
}  // namespace lockstep::doctor_test
