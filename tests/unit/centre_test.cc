#include "lockstep/net/job/centre.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "lockstep/wire/wire_error.h"
#include "tests/support/build_kind.h"

namespace lockstep::centre_test {
namespace {

using namespace std::chrono_literals;
using test::kSanitizers;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Members that answer a centre as real ones do, without a network between them. They remember the
// roster as one, so that there may be thousands.
class Crowd {
 public:
  explicit Crowd(int members, bool moves = true, bool invites = false) {
    centre_ = make_centre(members, moves, {}, invites);
  }

  struct Counts {
    std::uint64_t messages_in = 0;
    std::uint64_t bytes_in = 0;
    std::map<MessageKind, std::uint64_t> out;
    std::uint64_t bytes_out = 0;

    std::uint64_t messages_out() const {
      std::uint64_t sum = 0;
      for (const auto& [kind, count] : out) sum += count;
      return sum;
    }
  };
  // What went to and from the centre since the last call, but for heartbeats.
  Counts take_counts() { return std::exchange(counts_, {}); }

  Centre::LinkId open(int process) {
    const Centre::LinkId link = next_link_++;
    links_[process] = link;
    processes_[link] = process;
    centre_->opened(link, std::nullopt, now);
    return link;
  }
  Card card(int process) const {
    Card card;
    card.rank = -1;
    card.world_size = 0;
    card.version = "1.0";
    card.id[0] = static_cast<std::byte>(process & 255);
    card.id[1] = static_cast<std::byte>(process >> 8);
    card.id[2] = std::byte{1};
    card.pid = 1000 + process;
    card.host = {fmt::format("node{}", process / 8), "6a1f7c5e-0d1b-4b5f-9d8c-1a2b3c4d5e6f", 7};
    card.mesh_address = fmt::format("10.0.{}.{}:5000", process / 250, process % 250 + 1);
    card.unix_name = "lockstep-0123456789abcdef0123456789abcdef";
    card.fingerprint = "x86-64-v4, glibc 2.36";
    card.cores = "0-7";
    return card;
  }
  void join(int process, Standing standing, std::int64_t step = 0) {
    Join join{.card = card(process),
              .patience = 100s,
              .standing = standing,
              .survives = true,
              .min_workers = 1,
              .last = {},
              .step = step};
    if (const auto rank = ranks_.find(process); rank != ranks_.end()) {
      join.card = roster_->roster[index_of(rank->second)];
      join.last = roster_->generation;
    }
    say(process, MessageKind::kJoin, encode(join));
  }
  void say(int process, MessageKind kind, std::span<const std::byte> body) {
    if (kind != MessageKind::kHeartbeat) {
      ++counts_.messages_in;
      counts_.bytes_in += kMessageHeaderBytes + body.size();
    }
    centre_->received(links_.at(process), {kind, {body.begin(), body.end()}}, now);
    turn();
  }
  void report(int process, const Error& error) {
    say(process, MessageKind::kReport, encode(Report{error, {}, tag_of(roster_->generation)}));
  }
  void close(int process) {
    centre_->closed(links_.at(process), now);
    links_.erase(process);
    turn();
  }
  void heartbeats() {
    std::vector<int> all;
    for (const auto& [process, link] : links_) all.push_back(process);
    for (const int process : all) {
      const std::uint32_t tag = roster_ ? tag_of(roster_->generation) : 0;
      if (!links_.contains(process) || silent.contains(process)) continue;
      say(process, MessageKind::kHeartbeat, encode(Pulse{tag}));
    }
  }
  void pass(Centre::Clock::duration time) {
    now += time;
    turn();
  }
  // Another process becomes the centre; the members come to it as they lose the one before.
  void move_centre(std::vector<int> lost) {
    std::vector<int> others;
    for (const auto& [process, rank] : ranks_) {
      if (std::ranges::find(lost, rank) == lost.end()) others.push_back(process);
    }
    centre_ = make_centre(static_cast<int>(roster_->roster.size()), true,
                          Inheritance{*roster_, {}, std::move(lost)});
    links_.clear();
    processes_.clear();
    for (const int process : others) {
      open(process);
      join(process, Standing::kBroken);
    }
  }
  // What the centre wants said, and what the members answer to it.
  void turn() {
    if (turning_) return;
    turning_ = true;
    centre_->tick(now);
    for (;;) {
      const auto sendings = centre_->take_sendings();
      if (sendings.empty()) break;
      for (const Centre::Sending& sending : sendings) hear(sending);
      centre_->tick(now);
    }
    turning_ = false;
  }

  Centre& centre() { return *centre_; }
  const RosterMessage& roster() const { return *roster_; }
  std::vector<int> processes() const {  // by rank
    std::vector<int> found;
    for (const Card& each : roster_->roster) found.push_back(each.pid - 1000);
    return found;
  }
  bool linked(int process) const { return links_.contains(process); }
  Centre::LinkId link(int process) const { return links_.at(process); }

  Centre::Time now = Centre::Time{} + 1h;
  bool answers = true;            // the end of a generation, a roster
  std::uint64_t go = 0;           // how many were told so
  std::vector<std::string> said;  // verdicts and ends
  std::set<int> silent;           // these say nothing by themselves
  std::map<int, Wish> wishes;
  std::map<int, int> heard;         // heartbeats
  std::set<Centre::LinkId> closed;  // by the centre
  std::optional<int> own;           // the process that has the next centre

 private:
  std::unique_ptr<Centre> make_centre(int members, bool moves, std::optional<Inheritance> inherited,
                                      bool invites = false) {
    CentreOptions options{.card = {-1, "the launcher", "node0", 1},
                          .world_size = members,
                          .version = "1.0",
                          .timeout = 10s,
                          .patience = 100s,
                          .member = own ? std::optional(card(*own).id) : std::nullopt,
                          .moves = moves,
                          .make_id = [this] { return MemberId{static_cast<std::byte>(++ids_)}; }};
    if (invites) options.invitation = {std::byte{1}};
    if (!inherited) return std::make_unique<Centre>(std::move(options), now);
    return std::make_unique<Centre>(std::move(options), std::move(*inherited), now);
  }

  void hear(const Centre::Sending& sending) {
    const auto found = processes_.find(sending.link);
    if (found == processes_.end()) return;
    const int process = found->second;
    if (sending.bytes) answer(process, sending.bytes);
    if (sending.last) {
      closed.insert(sending.link);
      processes_.erase(sending.link);
      if (links_.contains(process) && links_.at(process) == sending.link) links_.erase(process);
    }
  }

  void answer(int process, const SharedBytes& bytes) {
    const bool known = parsed_.first == bytes;
    if (!known) {
      MessageBuffer buffer;
      buffer.append(*bytes);
      parsed_ = {bytes, *buffer.next(kMaxRosterBody, "the centre")};
    }
    const Message& message = parsed_.second;
    if (message.kind == MessageKind::kHeartbeat) {
      ++heard[process];
      return;
    }
    ++counts_.out[message.kind];
    counts_.bytes_out += bytes->size();
    switch (message.kind) {
      case MessageKind::kRoster:
      case MessageKind::kRosterChange:
        if (!known) {
          auto next = message.kind == MessageKind::kRoster ? decode_roster(message.body)
                                                           : changed_roster(message);
          ASSERT_TRUE(next);
          if (!roster_ || roster_->generation != next->generation) {
            before_ = std::exchange(roster_, std::move(next));
            ranks_.clear();
            for (const Card& each : roster_->roster) ranks_[each.pid - 1000] = each.rank;
          } else {
            EXPECT_EQ(*roster_, *next);  // whole or as a difference, it is the same
          }
        }
        if (answers && !silent.contains(process) && roster_->generation.number > 1) {
          say(process, MessageKind::kReady, encode_tag(tag_of(roster_->generation)));
        }
        return;
      case MessageKind::kEnd:
        said.push_back(decode_generation_end(message.body)->error.what());
        if (answers && !silent.contains(process)) join(process, Standing::kBroken);
        return;
      case MessageKind::kVerdict:
        said.push_back(decode_wire_error(message.body)->error().what());
        return;
      case MessageKind::kGo: ++go; return;
      case MessageKind::kWish: wishes[process] = *decode_wish(message.body); return;
      default: return;
    }
  }
  std::optional<RosterMessage> changed_roster(const Message& message) const {
    const auto change = decode_roster_change(message.body);
    const bool newest = roster_->generation == change->base;
    return changed(newest ? *roster_ : *before_, *change);
  }

  std::unique_ptr<Centre> centre_;
  Centre::LinkId next_link_ = 1;
  std::map<int, Centre::LinkId> links_;
  std::map<Centre::LinkId, int> processes_;
  std::map<int, int> ranks_;
  std::optional<RosterMessage> roster_;
  std::optional<RosterMessage> before_;
  std::pair<SharedBytes, Message> parsed_;
  Counts counts_;
  int ids_ = 0;  // of generations
  bool turning_ = false;
};

struct Formed : Crowd {
  explicit Formed(int members, bool moves = true) : Crowd(members, moves) {
    for (int process = 0; process < members; ++process) {
      open(process);
      join(process, Standing::kNew);
    }
  }
};

TEST(Centre, ALossMakesTheNextGenerationOfTheOthers) {
  Formed job(3);
  job.close(1);
  EXPECT_EQ(job.roster().generation.number, 2u);
  EXPECT_THAT(job.processes(), ElementsAre(0, 2));
  EXPECT_EQ(job.go, 2u);
  ASSERT_EQ(job.roster().departed.size(), 1u);
  EXPECT_EQ(job.roster().departed[0].kind, Departure::Kind::kDied);
  EXPECT_THAT(job.said.at(0), HasSubstr("died: its connection closed"));
}

TEST(Centre, ANewcomerIsWishedForAndComesAtABoundary) {
  Formed job(2);
  job.say(0, MessageKind::kDescription, encode(Description{0, {std::byte{1}}}));
  job.open(7);
  job.join(7, Standing::kNew);
  EXPECT_FALSE(job.wishes.contains(0));  // it is not prepared yet
  job.join(7, Standing::kPrepared);
  EXPECT_TRUE(job.wishes[0].regroup);
  job.join(1, Standing::kBoundary);
  EXPECT_EQ(job.roster().generation.number, 1u);
  job.join(0, Standing::kBoundary);
  EXPECT_THAT(job.processes(), ElementsAre(0, 1, 7));
  EXPECT_EQ(job.roster().newcomers, 1u);
  EXPECT_EQ(job.go, 3u);
  EXPECT_TRUE(job.said.empty());  // nothing was lost
}

TEST(Centre, ARequestToSaveIsToldAgainToTheRankThatFollows) {
  Formed job(3);
  job.centre().wish({.save = 7});
  job.turn();
  EXPECT_EQ(job.wishes[0].save, 7u);
  job.wishes.clear();
  job.turn();
  EXPECT_TRUE(job.wishes.empty());
  job.close(0);
  EXPECT_EQ(job.wishes[1].save, 7u);
}

TEST(Centre, EveryRankIsAskedForItsFlightRecorderAndNoWishIsLost) {
  Formed job(3);
  job.centre().wish({.stop = 15});
  job.turn();
  EXPECT_EQ(job.wishes[0].stop, 15U);
  job.open(7);
  job.join(7, Standing::kNew);  // has done nothing yet
  job.wishes.clear();
  job.centre().ask_flight({}, {job.card(1).pid});  // of another host: only its number is the same
  job.turn();
  ASSERT_EQ(job.wishes.size(), 3U);
  for (const int process : {0, 1, 2}) {
    EXPECT_EQ(job.wishes[process], Wish{.stop = kWriteFlight}) << process;
  }
  job.wishes.clear();
  job.centre().ask_flight(job.card(1).host, {job.card(1).pid});
  job.turn();
  EXPECT_EQ(job.wishes.size(), 2U);
  EXPECT_FALSE(job.wishes.contains(1));
}

TEST(Centre, ANewcomerThatFallsSilentIsNotWaitedFor) {
  Formed job(2);
  job.say(0, MessageKind::kDescription, encode(Description{0, {std::byte{1}}}));
  job.open(7);
  job.join(7, Standing::kPrepared);
  EXPECT_TRUE(job.wishes[0].regroup);
  for (int i = 0; i < 7; ++i) {
    job.pass(2s);
    for (const int process : {0, 1}) {
      job.say(process, MessageKind::kHeartbeat, encode(Pulse{tag_of(job.roster().generation)}));
    }
  }
  EXPECT_FALSE(job.wishes[0].regroup);
  EXPECT_FALSE(job.linked(7));
}

TEST(Centre, WhoIsInvitedHearsOfItUntilTheJobForms) {
  Crowd job(2, /*moves=*/true, /*invites=*/true);
  job.open(0);
  job.join(0, Standing::kNew);
  job.join(0, Standing::kPrepared);
  for (int i = 0; i < 30; ++i) job.pass(1s);
  EXPECT_GE(job.heard[0], 6);
  EXPECT_TRUE(job.said.empty());
}

TEST(Centre, WhoIsInvitedAndComesLateIsToldToJoinAgain) {
  Crowd job(2, /*moves=*/true, /*invites=*/true);
  for (const int process : {7, 8, 9}) {
    job.open(process);
    job.join(process, Standing::kNew);
  }
  job.join(8, Standing::kPrepared);
  job.join(9, Standing::kPrepared);
  EXPECT_THAT(job.processes(), ElementsAre(8, 9));
  for (const int process : {8, 9}) {
    EXPECT_TRUE(job.linked(process));
    job.say(process, MessageKind::kHeartbeat, encode(Pulse{tag_of(job.roster().generation)}));
  }
  job.join(7, Standing::kPrepared);
  EXPECT_THAT(job.said, ElementsAre(HasSubstr("the job has begun meanwhile: join again")));
  EXPECT_FALSE(job.linked(7));
  EXPECT_EQ(job.roster().generation.number, 1u);
}

TEST(Centre, MembersBeyondTheLanesAreToldThatTheyAreSpares) {
  Formed job(2);
  job.say(0, MessageKind::kDescription, encode(Description{2, {std::byte{1}}}));
  job.open(7);
  job.join(7, Standing::kNew);
  job.pass(2s);
  EXPECT_FALSE(job.wishes.contains(7));  // it prepares
  job.join(7, Standing::kPrepared);
  job.pass(2s);
  EXPECT_EQ(job.wishes[7], Wish{.stop = kSpare});
  EXPECT_FALSE(job.wishes[0].regroup);
  job.wishes.clear();
  for (int i = 0; i < 5; ++i) {
    job.pass(2s);
    job.heartbeats();
  }
  EXPECT_TRUE(job.wishes.empty());  // once
  job.close(1);
  EXPECT_THAT(job.processes(), ElementsAre(0, 7));
}

TEST(Centre, WhoseSumsWouldDifferIsNotLetIn) {
  Formed job(2);
  job.say(0, MessageKind::kDescription, encode(Description{0, {std::byte{1}}}));
  const auto come = [&](int process, const Card& card) {
    job.open(process);
    job.say(process, MessageKind::kJoin,
            encode(Join{.card = card,
                        .patience = 100s,
                        .standing = Standing::kNew,
                        .survives = true,
                        .last = {}}));
    EXPECT_FALSE(job.linked(process));
    return job.said.back();
  };
  Card other = job.card(7);
  other.version = "1.1";
  EXPECT_THAT(come(7, other), HasSubstr("node0, pid 1007) runs lockstep 1.1, the job 1.0"));
  other = job.card(8);
  other.fingerprint = "aarch64, glibc 2.36";
  EXPECT_THAT(come(8, other), HasSubstr("has another kind of processor or C library (aarch64, "
                                        "glibc 2.36) than the job (x86-64-v4, glibc 2.36)"));
  EXPECT_EQ(job.roster().generation.number, 1u);
}

// A newcomer on another host than the members, or on theirs.
Join newcomer_at(Card card, const std::string& boot_id, const std::string& address,
                 Standing standing) {
  card.host.boot_id = boot_id;
  card.mesh_address = address;
  return {.card = card, .patience = 100s, .standing = standing, .survives = true, .last = {}};
}

TEST(Centre, ANewcomerThatTheMembersCannotReachIsTurnedAwayAndTheJobGoesOn) {
  Formed job(2);
  job.say(0, MessageKind::kDescription, encode(Description{0, {std::byte{1}}}));
  for (const Standing standing : {Standing::kNew, Standing::kPrepared}) {
    job.open(7);
    job.say(7, MessageKind::kJoin,
            encode(newcomer_at(job.card(7), "another host", "127.0.0.1:5000", standing)));
    ASSERT_FALSE(job.linked(7));
    EXPECT_THAT(job.said.back(),
                HasSubstr("node0, pid 1007) listens on 127.0.0.1:5000, which rank 0 (node0, pid "
                          "1000) on another host cannot reach; choose its network with "
                          "--interface"));
  }
  EXPECT_FALSE(job.wishes.contains(0));
  for (const int process : {0, 1}) job.join(process, Standing::kBoundary);
  EXPECT_THAT(job.processes(), ElementsAre(0, 1));
  EXPECT_FALSE(job.centre().verdict());
}

// Each of them could be let in alone.
TEST(Centre, OfNewcomersThatCannotReachEachOtherTheFirstIsLetIn) {
  Formed job(2);
  job.say(0, MessageKind::kDescription, encode(Description{0, {std::byte{1}}}));
  const std::string here = job.card(0).host.boot_id;
  const Join near = newcomer_at(job.card(7), here, "127.0.0.1:5000", Standing::kPrepared);
  const Join far = newcomer_at(job.card(8), "another host", "10.0.7.8:5000", Standing::kPrepared);
  job.open(7);
  job.say(7, MessageKind::kJoin, encode(near));
  job.open(8);
  job.say(8, MessageKind::kJoin, encode(far));
  EXPECT_TRUE(job.linked(8));
  job.wishes.clear();
  for (const int process : {0, 1}) job.join(process, Standing::kBoundary);
  EXPECT_THAT(job.processes(), ElementsAre(0, 1, 7));
  EXPECT_FALSE(job.linked(8));
  EXPECT_THAT(job.said, ElementsAre(HasSubstr("rank 2 (node0, pid 1007) listens on 127.0.0.1")));
  EXPECT_EQ(job.go, 3u);
  EXPECT_TRUE(job.wishes.empty());
}

// A newcomer, process 7, has the roster and connects to processes 0 and 1.
void let_newcomer_in(Formed& job) {
  job.say(0, MessageKind::kDescription, encode(Description{0, {std::byte{1}}}));
  job.open(7);
  job.join(7, Standing::kPrepared);
  job.answers = false;
  for (const int process : {0, 1}) job.join(process, Standing::kBoundary);
  ASSERT_THAT(job.processes(), ElementsAre(0, 1, 7));
  ASSERT_EQ(job.roster().newcomers, 1u);
}

TEST(Centre, WhateverANewcomerReportsWhileItEntersIsItsOwnLoss) {
  for (const ErrorCode code : {ErrorCode::kIo, ErrorCode::kAuthentication,
                               ErrorCode::kUnexpectedMessage, ErrorCode::kNoConnection}) {
    for (const int suspected : {-1, 0}) {
      Formed job(2);
      let_newcomer_in(job);
      job.answers = true;
      job.report(7, Error(code, "too many open files", suspected));
      job.pass(1s);
      EXPECT_FALSE(job.centre().verdict());
      EXPECT_THAT(job.processes(), ElementsAre(0, 1));
      ASSERT_EQ(job.roster().departed.size(), 1u);
      EXPECT_THAT(job.roster().departed[0].why, HasSubstr("too many open files"));
    }
  }
}

TEST(Centre, ADeathExplainsWhatANewcomerReportsWhileItEnters) {
  Formed job(2);
  let_newcomer_in(job);
  job.report(7, Error(ErrorCode::kPeerLost, "receiving descriptors", 1));
  job.pass(50ms);
  job.close(1);
  for (const int process : {0, 7}) {
    job.join(process, process == 7 ? Standing::kEnters : Standing::kBroken);
  }
  EXPECT_FALSE(job.centre().verdict());
  EXPECT_THAT(job.processes(), ElementsAre(0, 7));
  ASSERT_EQ(job.roster().departed.size(), 1u);
  EXPECT_EQ(job.roster().departed[0].rank, 1);
  EXPECT_THAT(job.roster().departed[0].why, HasSubstr("its connection closed"));
}

TEST(Centre, WhatANewcomerReportsOfOthersIsNoFailureOfItsOwnOnceItHasJoinedAgain) {
  Formed job(2);
  let_newcomer_in(job);
  job.report(7, Error(ErrorCode::kPeerLost, "receiving descriptors", 1));
  job.close(1);
  job.join(7, Standing::kEnters);
  job.close(7);
  job.join(0, Standing::kBroken);
  EXPECT_THAT(job.processes(), ElementsAre(0));
  ASSERT_EQ(job.roster().departed.size(), 2u);
  EXPECT_EQ(job.roster().departed[1].rank, 2);
  EXPECT_EQ(job.roster().departed[1].kind, Departure::Kind::kDied);
}

// Ranks tell who is new: the last ones.
TEST(Centre, WhoHasBegunBehindANewcomerThatHasNotIsNewAsWell) {
  Formed job(2);
  for (const int process : {7, 8}) {
    job.open(process);
    job.join(process, Standing::kPrepared);
  }
  job.answers = false;
  for (const int process : {0, 1}) job.join(process, Standing::kBoundary);
  ASSERT_THAT(job.processes(), ElementsAre(0, 1, 7, 8));
  job.close(1);
  job.join(0, Standing::kBroken);
  job.join(7, Standing::kEnters);
  job.join(8, Standing::kBroken);
  ASSERT_THAT(job.processes(), ElementsAre(0, 7, 8));
  EXPECT_EQ(job.roster().newcomers, 2u);
  job.report(8, Error(ErrorCode::kNoConnection, "no route to host", 0));
  job.answers = true;
  job.pass(1s);
  EXPECT_THAT(job.processes(), ElementsAre(0, 7));
}

TEST(Centre, ANewcomerWhoseGenerationEndsBeforeItHasBegunIsOneOfTheNextToo) {
  Formed job(2);
  let_newcomer_in(job);
  job.close(1);
  job.join(0, Standing::kBroken);
  job.join(7, Standing::kEnters);
  EXPECT_THAT(job.processes(), ElementsAre(0, 7));
  EXPECT_EQ(job.roster().newcomers, 1u);
  job.report(7, Error(ErrorCode::kNoConnection, "no route to host", 0));
  job.answers = true;
  job.pass(1s);
  EXPECT_FALSE(job.centre().verdict());
  EXPECT_THAT(job.processes(), ElementsAre(0));
  ASSERT_EQ(job.roster().departed.size(), 1u);
  EXPECT_THAT(job.roster().departed[0].why, HasSubstr("no route to host"));
}

TEST(Centre, TheLastWordsOfWhoGivesUpWhileTheGenerationFormsAreTold) {
  Formed job(3);
  job.answers = false;
  job.close(2);
  for (const int process : {0, 1}) job.join(process, Standing::kBroken);
  job.answers = true;
  // Both come in one turn of the centre.
  const std::uint32_t tag = tag_of(job.roster().generation);
  const auto link = job.link(1);
  const Error why(ErrorCode::kPeerLost, "too many open files", 1);
  job.centre().received(link, {MessageKind::kReport, encode(Report{why, {}, tag})}, job.now);
  job.centre().received(link, {MessageKind::kGoodbye, encode(Pulse{tag})}, job.now);
  job.turn();
  EXPECT_THAT(job.processes(), ElementsAre(0));
  ASSERT_EQ(job.roster().departed.size(), 1u);
  EXPECT_EQ(job.roster().departed[0].kind, Departure::Kind::kFailed);
  EXPECT_THAT(job.roster().departed[0].why, HasSubstr("too many open files"));
}

TEST(Centre, NobodyGoesBeforeAllAreReady) {
  Formed job(3);
  job.answers = false;
  job.close(2);
  job.join(0, Standing::kBroken);
  job.join(1, Standing::kBroken);
  EXPECT_EQ(job.roster().generation.number, 2u);
  const auto tag = encode_tag(tag_of(job.roster().generation));
  job.say(0, MessageKind::kReady, tag);
  job.say(0, MessageKind::kReady, tag);  // twice is once
  EXPECT_EQ(job.go, 0u);
  job.say(1, MessageKind::kReady, tag);
  EXPECT_EQ(job.go, 2u);
}

TEST(Centre, ReadyForAnotherGenerationCountsNothing) {
  Formed job(3);
  job.answers = false;
  const auto old = encode_tag(tag_of(job.roster().generation));
  job.close(2);
  job.join(0, Standing::kBroken);
  job.join(1, Standing::kBroken);
  job.say(0, MessageKind::kReady, old);
  job.say(1, MessageKind::kReady, old);
  EXPECT_EQ(job.go, 0u);
}

TEST(Centre, WhatItsProcessSawInAGenerationThatHasEndedCountsNothing) {
  Formed job(3);
  const std::uint32_t old = tag_of(job.roster().generation);
  job.close(2);
  for (const int rank : {2, 0}) {  // the one that is gone, and one that is another process now
    job.centre().report(Error(ErrorCode::kTimeout, "has not connected", rank), old, job.now);
    job.turn();
  }
  EXPECT_EQ(job.roster().generation.number, 2u);
  EXPECT_THAT(job.processes(), ElementsAre(0, 1));
  const std::uint32_t newest = tag_of(job.roster().generation);
  job.centre().report(Error(ErrorCode::kTimeout, "has not connected", 0), newest, job.now);
  job.turn();
  EXPECT_THAT(job.processes(), ElementsAre(1));
}

TEST(Centre, AMemberThatComesOverAnotherLinkKeepsItsPlace) {
  Formed job(3);
  job.open(1);  // its first link has not closed here yet
  job.join(1, Standing::kBroken);
  EXPECT_EQ(job.roster().generation.number, 2u);
  EXPECT_THAT(job.processes(), ElementsAre(0, 1, 2));
  EXPECT_EQ(job.go, 3u);
}

// The end of a link that its caller has given up may come long after the next call, and so may what
// it said over it.
TEST(Centre, OnlyTheNewestLinkOfANewcomerCounts) {
  Formed job(2);
  job.say(0, MessageKind::kDescription, encode(Description{0, {std::byte{1}}}));
  const Centre::LinkId given_up = job.open(7);
  job.join(7, Standing::kPrepared);
  job.open(7);
  job.join(7, Standing::kPrepared);
  EXPECT_TRUE(job.closed.contains(given_up));
  job.join(0, Standing::kBoundary);
  job.join(1, Standing::kBoundary);
  EXPECT_THAT(job.processes(), ElementsAre(0, 1, 7));
}

TEST(Centre, WhatComesLateOverAnOlderLinkChangesNothing) {
  Formed job(2);
  job.say(0, MessageKind::kDescription, encode(Description{0, {std::byte{1}}}));
  const Centre::LinkId first = job.open(7);
  const Centre::LinkId second = job.open(7);
  job.open(7);
  job.join(7, Standing::kPrepared);
  const auto say_late = [&](Centre::LinkId link) {
    const Join late{.card = job.card(7),
                    .patience = 100s,
                    .standing = Standing::kPrepared,
                    .survives = true,
                    .last = {}};
    job.centre().received(link, {MessageKind::kJoin, encode(late)}, job.now);
    job.turn();
    EXPECT_TRUE(job.closed.contains(link));
  };
  say_late(first);
  job.join(0, Standing::kBoundary);
  job.join(1, Standing::kBoundary);
  ASSERT_THAT(job.processes(), ElementsAre(0, 1, 7));
  say_late(second);  // it has a rank now
  job.join(0, Standing::kBroken);
  EXPECT_EQ(job.roster().generation.number, 3u);
  EXPECT_THAT(job.processes(), ElementsAre(0, 1, 7));
}

// While the next generation is under way, too.
TEST(Centre, AMemberKeepsItsNewestLink) {
  Formed job(3);
  job.answers = false;
  job.close(2);
  const Centre::LinkId given_up = job.open(1);
  job.open(1);
  job.join(1, Standing::kBroken);
  const Join late{.card = job.roster().roster[1],
                  .patience = 100s,
                  .standing = Standing::kBroken,
                  .survives = true,
                  .last = job.roster().generation};
  job.centre().received(given_up, {MessageKind::kJoin, encode(late)}, job.now);
  job.turn();
  EXPECT_TRUE(job.closed.contains(given_up));
  EXPECT_TRUE(job.linked(1));
  job.join(0, Standing::kBroken);
  EXPECT_THAT(job.processes(), ElementsAre(0, 1));
}

TEST(Centre, AMemberThatMissedAGenerationHasOneRankInTheNext) {
  Formed job(3);
  job.answers = false;
  job.close(2);
  const Join stale{.card = job.roster().roster[1],
                   .patience = 100s,
                   .standing = Standing::kBroken,
                   .survives = true,
                   .last = job.roster().generation};
  job.join(0, Standing::kBroken);
  job.join(1, Standing::kBroken);
  ASSERT_EQ(job.roster().generation.number, 2u);
  // Its link broke before the roster came: it comes over another one, from the first generation.
  job.answers = true;
  job.open(1);
  job.say(1, MessageKind::kJoin, encode(stale));
  EXPECT_THAT(job.processes(), ElementsAre(0, 1));
  EXPECT_EQ(job.roster().generation.number, 3u);
}

TEST(Centre, WhoLeavesWhileTheGenerationFormsIsLostToIt) {
  Formed job(3);
  job.answers = false;
  job.close(2);
  job.join(0, Standing::kBroken);
  job.join(1, Standing::kBroken);
  job.answers = true;
  job.say(1, MessageKind::kGoodbye, encode(Pulse{tag_of(job.roster().generation)}));
  EXPECT_THAT(job.processes(), ElementsAre(0));
  EXPECT_EQ(job.roster().departed.at(0).kind, Departure::Kind::kLeft);
  EXPECT_EQ(job.go, 1u);
}

TEST(Centre, APauseOfItsOwnIsNobodysSilence) {
  Formed job(3);
  job.pass(2s);
  job.heartbeats();
  job.pass(60s);  // all of them stood still: a shell's job that was suspended
  for (int i = 0; i < 3; ++i) {
    job.heartbeats();
    job.pass(2s);
  }
  EXPECT_FALSE(job.centre().resigned());
  EXPECT_EQ(job.roster().generation.number, 1u);
  job.close(1);  // later losses are what they were
  EXPECT_THAT(job.processes(), ElementsAre(0, 2));
}

// The clock stands still while a machine is suspended.
TEST(Centre, ResignsWhenMembersHaveGoneWhileItsMachineWasSuspended) {
  Formed job(3);
  job.pass(2s);
  job.heartbeats();
  job.centre().machine_slept(60s);
  job.close(1);
  EXPECT_TRUE(job.centre().resigned());
  EXPECT_EQ(job.roster().generation.number, 1u);
}

TEST(Centre, WhatALauncherSawOfAProcessIsToldOfThatOfItsHost) {
  Formed job(3);
  HostIdentity other = job.card(1).host;
  other.network_namespace += 1;
  job.centre().process_ended(other, job.card(1).pid, "was killed by signal 11", true);
  job.close(1);
  ASSERT_EQ(job.roster().departed.size(), 1u);
  EXPECT_EQ(job.roster().departed[0].kind, Departure::Kind::kDied);
  EXPECT_THAT(job.roster().departed[0].why, HasSubstr("its connection closed"));
  job.centre().process_ended(job.card(2).host, job.card(2).pid, "was killed by signal 11", true);
  job.close(2);
  ASSERT_EQ(job.roster().departed.size(), 1u);
  EXPECT_EQ(job.roster().departed[0].kind, Departure::Kind::kFailed);
  EXPECT_EQ(job.roster().departed[0].why, "was killed by signal 11");
}

TEST(Centre, ResignsWhenMembersHaveGoneWhileItStoodStill) {
  Formed job(3);
  job.pass(2s);
  job.heartbeats();
  job.now += 60s;
  job.close(1);
  EXPECT_TRUE(job.centre().resigned());
  EXPECT_EQ(job.roster().generation.number, 1u);
  for (const int process : {0, 2}) EXPECT_FALSE(job.linked(process));
}

// Members count from its last heartbeat, which was 2 s before the pause.
TEST(Centre, ResignsWhenAMemberHeardNothingForTheTimeoutThoughItStoodStillForLess) {
  for (const bool reported : {true, false}) {
    Formed job(3);
    job.pass(2s);
    job.heartbeats();
    job.now += 2s - 1ms;  // it hears of its members now, and says nothing itself
    job.centre().received(job.link(2),
                          {MessageKind::kHeartbeat, encode(Pulse{tag_of(job.roster().generation)})},
                          job.now);
    job.now += 8s + 2ms;
    if (reported) {
      job.report(1, Error(ErrorCode::kPeerLost, "heard nothing from the launcher for 10s", -1));
    } else {
      job.close(1);
    }
    EXPECT_TRUE(job.centre().resigned());
    EXPECT_EQ(job.roster().generation.number, 1u);
  }
}

// It looked at the time, and paused before it spoke; or what it said came a little late.
TEST(Centre, ResignsWhenAMemberHeardNothingForTheTimeoutAndItPausedForNearlySoLong) {
  Formed job(3);
  job.pass(2s);
  job.heartbeats();
  job.now += 10s - 5ms;
  job.heartbeats();
  job.now += 10ms;
  job.report(1, Error(ErrorCode::kPeerLost, "heard nothing from the launcher for 10s", -1));
  EXPECT_TRUE(job.centre().resigned());
  EXPECT_EQ(job.roster().generation.number, 1u);
}

// Until the job has formed its members expect no heartbeats.
TEST(Centre, AJobThatFormsSlowlyWasNotPaused) {
  Crowd job(3);
  for (const int process : {0, 1}) {
    job.open(process);
    job.join(process, Standing::kNew);
  }
  for (int i = 0; i < 30; ++i) job.pass(1s);
  job.open(2);
  job.join(2, Standing::kNew);
  ASSERT_THAT(job.processes(), ElementsAre(0, 1, 2));
  job.pass(1ms);
  job.close(1);
  EXPECT_FALSE(job.centre().resigned());
  EXPECT_THAT(job.processes(), ElementsAre(0, 2));
}

// A member whose link was cut for the timeout has not failed by itself.
TEST(Centre, WhoHasLostTheCentreIsOutOfReach) {
  Formed job(3);
  job.pass(2s);
  job.heartbeats();
  job.report(1, Error(ErrorCode::kPeerLost, "heard nothing from the launcher for 10s", -1));
  EXPECT_FALSE(job.centre().resigned());
  EXPECT_THAT(job.processes(), ElementsAre(0, 2));
  EXPECT_EQ(job.roster().departed[0].kind, Departure::Kind::kExpelled);
}

// The member goes to the next rank, which knows that this centre lives.
TEST(Centre, WithARankLosesWhoHasLostItAndNotItsOwnRank) {
  Formed job(4);
  job.own = 1;
  job.move_centre({0});
  ASSERT_THAT(job.processes(), ElementsAre(1, 2, 3));
  ASSERT_EQ(job.roster().centre.rank, 0);
  job.pass(2s);
  job.heartbeats();
  job.report(2, Error(ErrorCode::kPeerLost, "heard nothing from rank 0 for 10s", 0));
  EXPECT_EQ(job.roster().departed.size(), 1u);
  job.close(2);
  EXPECT_THAT(job.processes(), ElementsAre(1, 3));
  ASSERT_EQ(job.roster().departed.size(), 1u);
  EXPECT_THAT(job.roster().departed[0].why, HasSubstr("lost its connection to rank 0"));
}

TEST(Centre, ThatNeverMovesKeepsAMemberThatLostItInAPause) {
  Formed job(3, /*moves=*/false);
  job.pass(2s);
  job.heartbeats();
  job.now += 60s;
  job.report(1, Error(ErrorCode::kPeerLost, "heard nothing from the launcher for 10s", -1));
  for (const int process : {0, 1, 2}) {
    if (job.linked(process)) job.close(process);
    job.open(process);
    job.join(process, Standing::kBroken);
  }
  for (int i = 0; i < 3; ++i) {
    job.pass(2s);
    job.heartbeats();
  }
  EXPECT_EQ(job.roster().generation.number, 2u);
  EXPECT_THAT(job.processes(), ElementsAre(0, 1, 2));
}

TEST(Centre, ThatNeverMovesWaitsForItsMembersAfterAPause) {
  Formed job(3, /*moves=*/false);
  job.pass(2s);
  job.heartbeats();
  job.now += 60s;
  for (const int process : {0, 1, 2}) job.close(process);
  EXPECT_FALSE(job.centre().resigned());
  for (const int process : {2, 0, 1}) {
    job.open(process);
    job.join(process, Standing::kBroken);
  }
  for (int i = 0; i < 3; ++i) {
    job.pass(2s);
    job.heartbeats();
  }
  EXPECT_EQ(job.roster().generation.number, 2u);
  EXPECT_THAT(job.processes(), ElementsAre(0, 1, 2));
}

TEST(Centre, ThatNeverMovesGoesOnWithNewcomersWhenAllHaveDiedInAPause) {
  for (const bool running : {true, false}) {
    Formed job(3, /*moves=*/false);
    job.say(0, MessageKind::kDescription, encode(Description{0, {std::byte{1}}}));
    job.pass(2s);
    job.heartbeats();
    if (!running) job.close(0);  // the others are about to regroup
    job.now += 60s;
    for (const int process : {0, 1, 2}) {
      if (job.linked(process)) job.close(process);
    }
    job.open(3);
    job.join(3, Standing::kPrepared);
    for (int i = 0; i < 60 && job.processes() != std::vector<int>{3}; ++i) {
      job.pass(1s);
      job.heartbeats();
    }
    EXPECT_THAT(job.processes(), ElementsAre(3));
    EXPECT_EQ(job.roster().generation.number, running ? 2u : 3u);
  }
}

TEST(Centre, StartedAnewExpectsTheNewestGenerationThatItHearsOf) {
  Formed first(3);
  const RosterMessage old = first.roster();
  first.close(2);
  const RosterMessage newest = first.roster();
  Crowd job(3, /*moves=*/false);
  const auto come = [&](int process, const RosterMessage& last, int rank) {
    job.open(process);
    job.say(process, MessageKind::kJoin,
            encode(Join{.card = last.roster[index_of(rank)],
                        .patience = 100s,
                        .standing = Standing::kBroken,
                        .survives = true,
                        .last = last.generation}));
  };
  come(2, old, 2);  // it was lost, and comes first
  come(1, newest, 1);
  come(0, newest, 0);
  EXPECT_EQ(job.roster().generation.number, newest.generation.number + 1);
  EXPECT_THAT(job.processes(), ElementsAre(0, 1, 2));
}

TEST(Centre, TellsTooFewBeforeTheyGiveUp) {
  Formed job(2);
  Join join{.card = job.roster().roster[0],
            .patience = 100s,
            .standing = Standing::kWaits,
            .survives = true,
            .min_workers = 2,
            .last = job.roster().generation};
  job.answers = false;
  job.say(0, MessageKind::kJoin, encode(join));
  job.close(1);
  const auto since = job.now;
  while (job.said.empty() || job.said.back().find("that the job needs") == std::string::npos) {
    ASSERT_LT(job.now - since, 100s);
    job.pass(1s);
    job.heartbeats();
  }
}

// What a centre of thousands sends and hears. Forming sends whole rosters, what follows
// differences.
TEST(Centre, OfThousands) {
  const int members = kSanitizers.empty() ? 4096 : 256;
  const auto n = static_cast<std::uint64_t>(members);
  Formed job(members);
  auto counts = job.take_counts();
  const std::uint64_t roster_bytes = encode(job.roster()).size() + kMessageHeaderBytes;
  EXPECT_EQ(counts.messages_in, n);
  EXPECT_EQ(counts.messages_out(), n);
  EXPECT_EQ(counts.bytes_out, n * roster_bytes);
  EXPECT_LT(roster_bytes, 256 * n);
  EXPECT_LT(counts.bytes_in, 512 * n);
  const auto note = [](const std::string& what, const Crowd::Counts& seen) {
    ::testing::Test::RecordProperty(
        what, fmt::format("{} messages, {} bytes in; {} messages, {} bytes out", seen.messages_in,
                          seen.bytes_in, seen.messages_out(), seen.bytes_out));
  };
  note("form", counts);

  job.say(0, MessageKind::kDescription, encode(Description{0, {std::byte{1}}}));
  job.take_counts();
  job.close(members / 2);
  counts = job.take_counts();
  EXPECT_EQ(job.roster().roster.size(), n - 1);
  EXPECT_EQ(counts.messages_in, 2 * (n - 1));  // a join and that it is ready
  EXPECT_EQ(counts.out[MessageKind::kEnd], n - 1);
  EXPECT_EQ(counts.out[MessageKind::kRosterChange], n - 1);
  EXPECT_EQ(counts.out[MessageKind::kGo], n - 1);
  EXPECT_EQ(counts.messages_out(), 3 * (n - 1));
  EXPECT_LT(counts.bytes_out, 1024 * n);
  EXPECT_LT(counts.bytes_in, 512 * n);
  note("lose one", counts);

  job.open(members);
  job.join(members, Standing::kNew);
  job.join(members, Standing::kPrepared);
  for (const int process : job.processes()) job.join(process, Standing::kBoundary);
  counts = job.take_counts();
  EXPECT_EQ(job.roster().roster.size(), n);
  EXPECT_EQ(counts.out[MessageKind::kRoster], 1u);  // to the newcomer
  EXPECT_EQ(counts.out[MessageKind::kRosterChange], n - 1);
  EXPECT_EQ(counts.out[MessageKind::kGo], n);
  EXPECT_EQ(counts.messages_out(), 2 * n + 2);  // with a welcome and a wish
  EXPECT_EQ(counts.messages_in, 2 * n + 1);
  EXPECT_LT(counts.bytes_out, 1024 * n + roster_bytes);
  note("let one join", counts);

  job.move_centre({0});
  counts = job.take_counts();
  EXPECT_EQ(job.roster().roster.size(), n - 1);
  EXPECT_EQ(counts.messages_in, 2 * (n - 1));
  EXPECT_EQ(counts.out[MessageKind::kRosterChange], n - 1);
  EXPECT_EQ(counts.messages_out(), 2 * (n - 1));
  EXPECT_LT(counts.bytes_out, 1024 * n);
  note("lose the centre", counts);

  // Half of them fall silent at once: each is told that it is lost, and nobody else anew.
  const std::vector<int> before = job.processes();
  for (std::size_t i = 1; i < before.size(); i += 2) job.silent.insert(before[i]);
  const std::uint64_t silent = job.silent.size();
  while (job.roster().roster.size() > before.size() - silent) {
    ASSERT_LT(job.now, Centre::Time{} + 2h);
    job.pass(1s);
    job.heartbeats();
  }
  counts = job.take_counts();
  const std::uint64_t left = before.size() - silent;
  EXPECT_EQ(job.roster().roster.size(), left);
  EXPECT_EQ(counts.out[MessageKind::kRosterChange], left);
  EXPECT_LE(counts.out[MessageKind::kEnd], before.size() + silent);
  note("lose half", counts);

  for (int process = members + 1; process <= 2 * members; ++process) {
    job.open(process);
    job.join(process, Standing::kNew);
    job.join(process, Standing::kPrepared);
  }
  counts = job.take_counts();
  EXPECT_EQ(counts.messages_in, 2 * n);
  EXPECT_LE(counts.messages_out(), n + 1);  // a welcome each, and one wish
  note("newcomers come", counts);
  for (const int process : job.processes()) job.join(process, Standing::kBoundary);
  EXPECT_EQ(job.roster().roster.size(), left + n);
  counts = job.take_counts();
  EXPECT_EQ(counts.out[MessageKind::kRoster], n);
  note("newcomers enter", counts);
}

}  // namespace
}  // namespace lockstep::centre_test
