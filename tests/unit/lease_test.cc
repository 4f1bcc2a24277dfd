#include "lockstep/files/lease.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "tests/support/faulty_storage.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::lease_test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Act = LeaseRule::Act;

constexpr auto kTerm = 10s;

LeaseRecord record_of(const std::string& member, std::uint64_t counter) {
  LeaseRecord record;
  record.job = "job \"one\"";
  record.generation = "g1";
  record.member = member;
  record.host = "there";
  record.process_space = "elsewhere 7";
  record.process = 12;
  record.process_began = 1234567890123;
  record.term = 10s;
  record.counter = counter;
  return record;
}

LeaseRule::Look look_at(const std::string& member, std::uint64_t counter) {
  const LeaseRecord record = record_of(member, counter);
  return {true, to_json(record), record, false};
}

const LeaseRule::Time kBegin{1000s};

TEST(LeaseRecord, ReadsWhatItWrites) {
  EXPECT_EQ(parse_lease(to_json(record_of("a", 7))), record_of("a", 7));
  EXPECT_EQ(to_json(record_of("a", 7)).size(), to_json(record_of("a", UINT64_MAX)).size());
  const std::string text = to_json(record_of("a", 7));
  EXPECT_EQ(parse_lease(text.substr(0, text.size() / 2)), std::nullopt);
  for (const char* other : {"", "{}", "[]", "{\"format\":\"lockstep lease\"}"}) {
    EXPECT_EQ(parse_lease(other), std::nullopt);
  }
}

TEST(LeaseRule, WhoMakesTheFileHoldsItAndRenewsEveryFifth) {
  LeaseRule rule("a", kTerm);
  EXPECT_EQ(rule.next({}, kBegin), Act::kCreate);
  EXPECT_FALSE(rule.held({}, kBegin));
  rule.done(Act::kCreate, true, kBegin);
  EXPECT_TRUE(rule.held(look_at("a", 1), kBegin));
  EXPECT_FALSE(rule.held(look_at("b", 1), kBegin));
  EXPECT_EQ(rule.next(look_at("a", 1), kBegin + 1900ms), Act::kNothing);
  EXPECT_EQ(rule.next(look_at("a", 1), kBegin + 2s), Act::kRenew);
  rule.done(Act::kRenew, true, kBegin + 2s);
  EXPECT_EQ(rule.next(look_at("a", 2), kBegin + 3s), Act::kNothing);
  // The file has gone: somebody thought that it was its own.
  EXPECT_EQ(rule.next({}, kBegin + 3s), Act::kCreate);
  rule.done(Act::kCreate, false, kBegin + 3s);
  EXPECT_EQ(rule.next(look_at("b", 1), kBegin + 3s), Act::kNothing);
  EXPECT_FALSE(rule.held(look_at("b", 1), kBegin + 3s));
}

TEST(LeaseRule, ALeaseThatIsRenewedIsNeverTaken) {
  LeaseRule rule("b", kTerm);
  for (int i = 0; i < 1000; ++i) {
    const auto counter = static_cast<std::uint64_t>(i / 9);  // every nine seconds
    EXPECT_EQ(rule.next(look_at("a", counter), kBegin + 1s * i), Act::kNothing);
  }
  EXPECT_TRUE(rule.seen_renewed());
}

TEST(LeaseRule, ALeaseUnchangedForATermIsTakenAfterSettling) {
  LeaseRule rule("b", kTerm);
  LeaseRule::Time now = kBegin;
  for (; now < kBegin + 10s; now += 1s) EXPECT_EQ(rule.next(look_at("a", 5), now), Act::kNothing);
  EXPECT_EQ(rule.next(look_at("a", 5), now), Act::kReplace);
  EXPECT_FALSE(rule.seen_renewed());
  rule.done(Act::kReplace, true, now);
  EXPECT_FALSE(rule.held(look_at("b", 1), now));  // not yet
  EXPECT_EQ(rule.next(look_at("b", 1), now + 1s), Act::kNothing);
  EXPECT_FALSE(rule.held(look_at("b", 1), now + 1s));
  EXPECT_EQ(rule.next(look_at("b", 1), now + 2s), Act::kRenew);
  EXPECT_TRUE(rule.held(look_at("b", 1), now + 2s));
}

TEST(LeaseRule, OfTwoThatReplaceItTheLastOneWins) {
  LeaseRule first("a", kTerm);
  LeaseRule second("b", kTerm);
  LeaseRule::Time now = kBegin;
  Act acts[2] = {};
  for (; now <= kBegin + 10s; now += 1s) {
    acts[0] = first.next(look_at("x", 5), now);
    acts[1] = second.next(look_at("x", 5), now);
  }
  EXPECT_EQ(acts[0], Act::kReplace);
  EXPECT_EQ(acts[1], Act::kReplace);
  first.done(Act::kReplace, true, now);
  second.done(Act::kReplace, true, now + 1s);
  first.next(look_at("b", 1), now + 2s);
  second.next(look_at("b", 1), now + 3s);
  EXPECT_FALSE(first.held(look_at("b", 1), now + 3s));
  EXPECT_TRUE(second.held(look_at("b", 1), now + 3s));
}

TEST(LeaseRule, TheLongerTermCounts) {
  LeaseRule rule("b", 1s);
  LeaseRule::Time now = kBegin;
  for (; now < kBegin + 10s; now += 100ms) {
    EXPECT_EQ(rule.next(look_at("a", 5), now), Act::kNothing);
  }
  EXPECT_EQ(rule.next(look_at("a", 5), now), Act::kReplace);
}

TEST(LeaseRule, OwnPausesAreNobodysSilence) {
  LeaseRule rule("b", kTerm);
  rule.next(look_at("a", 5), kBegin);
  EXPECT_EQ(rule.next(look_at("a", 5), kBegin + 1h), Act::kNothing);
  LeaseRule::Time now = kBegin + 1h;
  for (int i = 0; i < 7; ++i) EXPECT_EQ(rule.next(look_at("a", 5), now += 1s), Act::kNothing);
  EXPECT_EQ(rule.next(look_at("a", 5), now += 1s), Act::kReplace);
}

TEST(LeaseRule, WhoWasStoppedForATermHoldsNothingThoughTheFileIsItsOwn) {
  LeaseRule rule("a", kTerm);
  rule.next({}, kBegin);
  rule.done(Act::kCreate, true, kBegin);
  EXPECT_TRUE(rule.held(look_at("a", 1), kBegin + 9s));
  EXPECT_FALSE(rule.held(look_at("a", 1), kBegin + 10s));
  EXPECT_EQ(rule.next(look_at("a", 1), kBegin + 10s), Act::kNothing);
  EXPECT_FALSE(rule.held(look_at("a", 1), kBegin + 11s));
  // Nobody wants it: it may have it again, as anybody may.
  LeaseRule::Time now = kBegin + 10s;
  for (int i = 0; i < 9; ++i) EXPECT_EQ(rule.next(look_at("a", 1), now += 1s), Act::kNothing);
  EXPECT_EQ(rule.next(look_at("a", 1), now += 1s), Act::kReplace);
}

TEST(LeaseRule, AHolderWhoseProcessHasEndedIsNotWaitedFor) {
  LeaseRule rule("b", kTerm);
  LeaseRule::Look look = look_at("a", 5);
  look.ended = true;
  EXPECT_EQ(rule.next(look, kBegin), Act::kReplace);
  rule.done(Act::kReplace, true, kBegin);
  EXPECT_FALSE(rule.held(look_at("b", 1), kBegin));
  rule.next(look_at("b", 1), kBegin + 100ms);
  EXPECT_TRUE(rule.held(look_at("b", 1), kBegin + 100ms));
}

// Members that share one file and one clock. Each looks when it likes, pauses at times, and acts up
// to a second after its look. Whoever finds that it holds the lease has a second to write.
TEST(LeaseRule, TwoNeverHoldItWhateverTheSchedule) {
  struct Player {
    std::string name;
    LeaseRule::Time next;
    LeaseRule rule = LeaseRule(name, kTerm);
    Act act = Act::kNothing;  // decided, not carried out
    LeaseRule::Time decided = {};
    std::uint64_t counter = 0;
    int file = -1;              // the one it has made
    LeaseRule::Time held = {};  // when it could last find so
  };
  for (unsigned seed = 0; seed < 100; ++seed) {
    std::mt19937 random(seed);
    const auto between = [&](int low, int high) {
      return std::chrono::milliseconds(std::uniform_int_distribution(low, high)(random));
    };
    std::vector<Player> players;
    for (const char* name : {"a", "b", "c"}) players.push_back({name, kBegin + between(0, 1000)});
    LeaseRule::Look file;
    int current = -1;  // which file stands there
    int made = 0;
    int changes = 0;
    std::string last;
    while (true) {
      Player& player = *std::ranges::min_element(players, {}, &Player::next);
      const LeaseRule::Time now = player.next;
      if (now > kBegin + 1000s) break;
      if (player.act == Act::kNothing) {
        player.act = player.rule.next(file, now);
        player.decided = now;
        const bool rests = player.act == Act::kNothing && random() % 20 == 0;
        player.next = now + (rests                         ? between(5'000, 60'000)
                             : player.act == Act::kNothing ? between(200, 1000)
                                                           : between(0, 1000));
      } else {
        const bool works = player.act != Act::kCreate || !file.there;
        if (works && player.act != Act::kRenew) current = player.file = made++;
        if (works && current == player.file) file = look_at(player.name, ++player.counter);
        player.rule.done(player.act, works, player.decided);
        player.act = Act::kNothing;
      }
      for (Player& one : players) {
        if (!one.rule.held(file, now)) continue;
        one.held = now;
        if (std::exchange(last, one.name) != one.name) ++changes;
        for (const Player& other : players) {
          ASSERT_TRUE(other.name == one.name || now - other.held >= 1s)
              << "seed " << seed << ": " << other.name << " and " << one.name;
        }
      }
    }
    EXPECT_GT(changes, 1) << "seed " << seed;
  }
}

class LeaseOnDisk : public ::testing::Test {
 protected:
  std::unique_ptr<Lease> member(const std::string& name, const std::string& generation = "g1") {
    Lease::Options options;
    options.folder = folder_.path();
    options.job = "job";
    options.generation = generation;
    options.member = name;
    options.term = kTerm;
    options.clock = [this] { return now_; };
    options.thread = false;
    return std::make_unique<Lease>(std::move(options));
  }
  // Time goes on for those who are awake.
  void pass(LeaseRule::Duration time, const std::vector<Lease*>& awake) {
    for (const auto until = now_ + time; now_ < until; now_ += 1s) {
      for (Lease* lease : awake) lease->turn();
    }
  }
  std::string file() const {
    std::ifstream stream(folder_.path() + "/" + kLeaseFile);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(std::filesystem::directory_iterator(folder_.path()), {}));
  }

  LeaseRule::Time now_ = kBegin;
  TemporaryFolder folder_;
};

TEST_F(LeaseOnDisk, IsForOneAndGoesWithIt) {
  auto first = member("a");
  auto second = member("b");
  pass(30s, {first.get(), second.get()});
  EXPECT_TRUE(first->held());
  EXPECT_FALSE(second->held());
  const auto record = parse_lease(file());
  ASSERT_TRUE(record);
  EXPECT_EQ(record->member, "a");
  EXPECT_GE(record->counter, 10U);
  EXPECT_EQ(record->process, ::getpid());
  EXPECT_EQ(files(), 1U);
  EXPECT_NO_THROW(first->require("this"));
  try {
    second->require("writing metrics.jsonl");
    ADD_FAILURE() << "b may write";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_THAT(error.what(), HasSubstr("writing metrics.jsonl is not done"));
    EXPECT_THAT(error.what(), HasSubstr("job job, process " + std::to_string(::getpid())));
  }
  first.reset();
  EXPECT_EQ(file(), "");
  second->turn();
  EXPECT_TRUE(second->held());
}

TEST_F(LeaseOnDisk, AStoppedHolderThatWakesWritesNothingAndTakesNothingBack) {
  auto stopped = member("a");
  auto other = member("b", "g2");
  pass(5s, {stopped.get(), other.get()});
  EXPECT_TRUE(stopped->held());
  pass(30s, {other.get()});
  EXPECT_TRUE(other->held());
  EXPECT_FALSE(stopped->held());
  EXPECT_THROW(stopped->require("this"), Error);
  pass(60s, {stopped.get(), other.get()});
  EXPECT_TRUE(other->held());
  EXPECT_FALSE(stopped->held());
  stopped.reset();
  EXPECT_TRUE(other->held());
  EXPECT_EQ(parse_lease(file())->generation, "g2");
}

// It had decided to renew when it was stopped: its write goes to a file that nobody reads.
TEST_F(LeaseOnDisk, WhoGivesItBackNeverHoldsItAgainAndNobodyWaitsForIt) {
  auto first = member("a");
  auto second = member("b");
  pass(1s, {first.get(), second.get()});
  first->give_back();
  EXPECT_FALSE(first->held());
  EXPECT_THROW(first->require("writing"), Error);
  EXPECT_FALSE(first->wait(Deadline::after(60s)));
  pass(1s, {second.get(), first.get()});
  EXPECT_TRUE(second->held());
  first.reset();
  EXPECT_TRUE(second->held());
}

// Nobody else can have had it since.
TEST_F(LeaseOnDisk, WhoStoodStillGivesBackWhatIsItsOwn) {
  auto first = member("a");
  auto second = member("b");
  pass(1s, {first.get(), second.get()});
  now_ += 15s;
  EXPECT_FALSE(first->held());
  first->give_back();
  second->turn();
  EXPECT_TRUE(second->held());
}

TEST_F(LeaseOnDisk, WhoWaitsAfterAPauseIsNotToldWhatWasSoBefore) {
  auto holder = member("a");
  holder->turn();
  now_ += 15s;
  EXPECT_FALSE(holder->wait(Deadline::after(0s)));
}

TEST_F(LeaseOnDisk, ARenewalThatComesTooLateChangesNothing) {
  auto stopped = member("a");
  auto other = member("b");
  pass(1s, {stopped.get()});
  const LeaseRule::Time before = now_;
  pass(30s, {other.get()});
  EXPECT_TRUE(other->held());
  const std::string text = file();
  std::filesystem::rename(folder_.path() + "/" + kLeaseFile, folder_.path() + "/aside");
  // What it saw then: its own file, two seconds old.
  LeaseRecord own = *parse_lease(text);
  own.member = "a";
  std::ofstream(folder_.path() + "/" + kLeaseFile) << to_json(own);
  const LeaseRule::Time after = now_;
  now_ = before + 2s;
  stopped->set_generation("g9");
  now_ = after;
  EXPECT_EQ(file(), to_json(own));
  std::filesystem::rename(folder_.path() + "/aside", folder_.path() + "/" + kLeaseFile);
  EXPECT_TRUE(other->held());
}

TEST_F(LeaseOnDisk, AHolderWhoseFileHasGoneMakesItAgain) {
  auto holder = member("a");
  pass(1s, {holder.get()});
  std::filesystem::remove(folder_.path() + "/" + kLeaseFile);
  EXPECT_TRUE(holder->held());
  EXPECT_EQ(parse_lease(file())->member, "a");
}

TEST_F(LeaseOnDisk, ANewGenerationOfTheHolderIsInTheFile) {
  auto holder = member("a");
  holder->turn();
  holder->set_generation("g2");
  EXPECT_EQ(parse_lease(file())->generation, "g2");
  EXPECT_TRUE(holder->held());
}

TEST_F(LeaseOnDisk, NonsenseInTheFileIsWaitedOut) {
  std::ofstream(folder_.path() + "/" + kLeaseFile) << "nonsense";
  auto one = member("a");
  pass(8s, {one.get()});
  EXPECT_FALSE(one->held());
  EXPECT_EQ(file(), "nonsense");
  pass(6s, {one.get()});
  EXPECT_TRUE(one->held());
}

TEST_F(LeaseOnDisk, AProcessOfThisHostThatHasEndedHoldsNothing) {
  const pid_t child = ::fork();
  if (child == 0) {
    member("child").release()->turn();
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(parse_lease(file())->member, "child");
  auto next = member("a");
  next->turn();
  EXPECT_FALSE(next->held());
  now_ += 200ms;
  next->turn();
  EXPECT_TRUE(next->held());
  EXPECT_EQ(parse_lease(file())->member, "a");
}

TEST(Lease, ARunThatBeginsIsRefusedWhileAnotherLives) {
  const TemporaryFolder folder;
  Lease::Options options;
  options.folder = folder.path();
  options.job = "the first";
  options.member = "a";
  options.term = 2s;  // held() may be asked late on a busy machine
  Lease first(options);
  first.take(Deadline::after(20s));
  EXPECT_TRUE(first.held());
  options.job = "the second";
  options.member = "b";
  Lease second(options);
  EXPECT_FALSE(second.wait(Deadline::after(10ms)));
  try {
    second.take(Deadline::after(20s));
    ADD_FAILURE() << "both run";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr("another run (job the first, process"));
    EXPECT_THAT(error.what(), HasSubstr("is writing to " + folder.path()));
  }
}

TEST(Lease, IsTakenWhenTheOtherEnds) {
  const TemporaryFolder folder;
  Lease::Options options;
  options.folder = folder.path();
  options.member = "a";
  options.term = 60s;
  std::optional<Lease> first(options);
  first->take(Deadline::after(20s));
  options.member = "b";
  options.term = 300ms;  // looks often
  Lease second(options);
  first.reset();
  EXPECT_TRUE(second.wait(Deadline::after(20s)));
}

// Of a process of this host it is known at once that it lives, however seldom it renews.
class TwoRuns : public ::testing::Test {
 protected:
  std::unique_ptr<Lease> lease(const std::string& member, const std::string& folder = "") {
    Lease::Options options;
    options.folder = folder.empty() ? folder_.path() : folder;
    options.job = "job " + member;
    options.member = member;
    options.term = 10min;
    return std::make_unique<Lease>(options);
  }
  // Why a second run may not begin; empty: it may.
  std::string refusal(const std::string& folder = "") {
    try {
      lease("b", folder)->take(Deadline::after(20s), 30ms);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      return error.what();
    }
    return "";
  }

  TemporaryFolder folder_;
  TemporaryFolder other_;
};

TEST_F(TwoRuns, OneAtATime) {
  auto first = lease("a");
  first->take(Deadline::after(20s));
  EXPECT_THAT(refusal(), HasSubstr("is writing to " + folder_.path()));
  EXPECT_EQ(refusal(other_.path()), "");
  first.reset();
  EXPECT_EQ(refusal(), "");
}

TEST_F(TwoRuns, TheOtherIsNamed) {
  const auto first = lease("a");
  first->take(Deadline::after(20s));
  EXPECT_THAT(refusal(),
              HasSubstr("another run (job job a, process " + std::to_string(::getpid()) + " on "));
}

TEST_F(TwoRuns, TheOtherMayStillBeEnding) {
  const auto first = lease("a");
  first->take(Deadline::after(20s));
  const auto begin = Deadline::Clock::now();
  EXPECT_NE(refusal(), "");
  EXPECT_GE(Deadline::Clock::now() - begin, 30ms);
  EXPECT_LT(Deadline::Clock::now() - begin, 10s);  // and not a fifth of the term
}

// File systems without hard links: nobody writes there unnoticed.
TEST(Lease, OneThatCannotBeHadIsSaid) {
  test::FaultyStorage storage;
  make_folder("/out", storage);
  storage.fault = [](test::FaultyStorage::Call call, const std::string&) {
    return call == test::FaultyStorage::Call::kLink ? EPERM : 0;
  };
  Lease::Options options;
  options.folder = "/out";
  options.member = "a";
  options.term = 100ms;
  options.storage = &storage;
  Lease lease(options);
  try {
    lease.take(Deadline::after(50ms));
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout);
    EXPECT_THAT(error.what(), HasSubstr("/out is not free: creating /out/lease.json"));
    EXPECT_THAT(error.what(), HasSubstr("Operation not permitted"));
  }
  EXPECT_THROW(lease.require("writing"), Error);
}

TEST(Lease, ADiskThatFailsLosesIt) {
  test::FaultyStorage storage;
  make_folder("/out", storage);
  LeaseRule::Time now = kBegin;
  Lease::Options options;
  options.folder = "/out";
  options.member = "a";
  options.term = kTerm;
  options.storage = &storage;
  options.clock = [&] { return now; };
  options.thread = false;
  Lease lease(options);
  EXPECT_TRUE(lease.held());
  for (const int error : {EIO, ENOSPC, EDQUOT}) {
    storage.fault = [&](test::FaultyStorage::Call call, const std::string&) {
      return call == test::FaultyStorage::Call::kWrite ? error : 0;
    };
    now += kTerm * 9 / 10;
    EXPECT_TRUE(lease.held()) << error;
    now += kTerm / 5;
    EXPECT_FALSE(lease.held()) << error;  // nobody could renew it
    storage.fault = {};
    // Its own file still stands there, and nobody has taken it for a whole term.
    for (int i = 0; i < 20 && !lease.held(); ++i) now += kTerm / 10;
    EXPECT_TRUE(lease.held()) << error;
  }
}

TEST(Lease, OneReadThatFailsCostsNoTerm) {
  test::FaultyStorage storage;
  make_folder("/out", storage);
  LeaseRule::Time now = kBegin;
  Lease::Options options;
  options.folder = "/out";
  options.member = "a";
  options.term = kTerm;
  options.storage = &storage;
  options.clock = [&] { return now; };
  options.thread = false;
  Lease lease(options);
  const auto fail_reads = [&](bool fail) {
    storage.fault = [=](test::FaultyStorage::Call call, const std::string&) {
      return fail && call == test::FaultyStorage::Call::kRead ? EIO : 0;
    };
  };
  EXPECT_TRUE(lease.held());
  now += kTerm / 2;
  fail_reads(true);
  EXPECT_FALSE(lease.held());  // nobody knows
  fail_reads(false);
  EXPECT_TRUE(lease.held());
  fail_reads(true);
  now += kTerm;
  EXPECT_FALSE(lease.held());
  fail_reads(false);
  EXPECT_FALSE(lease.held());  // others may be about to take it
}

// A write is not given up because the lease could not be read once.
TEST(Lease, OneReadThatFailsStopsNoWrite) {
  test::FaultyStorage storage;
  make_folder("/out", storage);
  Lease::Options options;
  options.folder = "/out";
  options.member = "a";
  options.term = 10s;
  options.storage = &storage;
  std::atomic<int> failed = 0;
  Lease lease(options);
  lease.take(Deadline::after(1s));
  storage.fault = [&](test::FaultyStorage::Call call, const std::string&) {
    return call == test::FaultyStorage::Call::kRead && failed++ == 0 ? EIO : 0;
  };
  EXPECT_NO_THROW(lease.require("writing"));
  EXPECT_GE(failed, 2);
}

TEST(Lease, AFileThatCannotBeReadStopsAWriteAfterATerm) {
  test::FaultyStorage storage;
  make_folder("/out", storage);
  Lease::Options options;
  options.folder = "/out";
  options.member = "a";
  options.term = 300ms;
  options.storage = &storage;
  Lease lease(options);
  lease.take(Deadline::after(1s));
  storage.fault = [](test::FaultyStorage::Call call, const std::string&) {
    return call == test::FaultyStorage::Call::kRead ? EIO : 0;
  };
  EXPECT_THROW(lease.require("writing"), Error);
}

TEST(Lease, NeedsAFolderItCanWriteTo) {
  Lease::Options options;
  options.folder = "/proc";
  options.member = "a";
  options.term = 100ms;
  Lease lease(options);
  try {
    lease.take(Deadline::after(50ms));
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kTimeout);
    EXPECT_THAT(error.what(), HasSubstr("lease.json"));
  }
}

}  // namespace
}  // namespace lockstep::lease_test
