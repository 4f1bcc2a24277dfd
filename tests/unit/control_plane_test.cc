#include "lockstep/net/job/control_plane.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/net/job/job.h"
#include "lockstep/net/job/member.h"
#include "lockstep/net/socket/unix_socket.h"
#include "lockstep/wire/control_messages.h"
#include "lockstep/wire/wire_error.h"
#include "tests/support/ranks.h"

namespace lockstep::control_plane_test {
namespace {

using ::testing::HasSubstr;
using namespace test;

// A job whose last rank is played by hand; the others are real.
struct WithRankByHand {
  WithRankByHand(int world_size, std::chrono::milliseconds timeout) : setup(world_size, timeout) {
    jobs.resize(world_size - 1);
    const auto errors = run_ranks(world_size, [&](int rank) {
      if (rank < world_size - 1) {
        jobs[rank] = setup.join(rank);
      } else {
        last.emplace(setup, rank);
        last->join();
      }
    });
    for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
  }

  LoopbackJob setup;
  std::vector<JoinedJob> jobs;
  std::optional<RankByHand> last;
};

void expect_all(std::vector<JoinedJob>& jobs, ErrorCode code, int rank, const std::string& text) {
  for (JoinedJob& job : jobs) {
    const Error error = wait_for_failure(job.control->latch());
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_EQ(error.rank(), rank) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(text));
    EXPECT_STREQ(error.what(), jobs[0].control->latch().error()->what());
  }
}

TEST(ControlPlane, ADeadRankIsNamedToAll) {
  WithRankByHand world(4, 10s);
  world.last.reset();
  expect_all(world.jobs, ErrorCode::kPeerLost, 3, "died: its connection closed");
}

TEST(ControlPlane, ASilentRankIsNamedToAllAfterTheTimeout) {
  const auto start = Deadline::Clock::now();
  WithRankByHand world(3, 300ms);
  expect_all(world.jobs, ErrorCode::kPeerLost, 2, "has been silent for 300ms");
  EXPECT_GE(Deadline::Clock::now() - start, 300ms);
}

TEST(ControlPlane, ALivingJobStaysAlive) {
  LoopbackJob setup(3, 1s);
  auto jobs = setup.join_all();
  // Several timeouts long, nobody may be declared dead.
  pollfd entry{jobs[1].control->latch().fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 3000), 0);
  for (JoinedJob& job : jobs) EXPECT_FALSE(job.control->latch().tripped());
}

TEST(ControlPlane, AMalformedMessageIsBlamedOnItsSender) {
  WithRankByHand world(3, 10s);
  world.last->link.send(MessageKind::kReport, {}, soon());
  expect_all(world.jobs, ErrorCode::kUnexpectedMessage, 2, "sent a malformed report");
}

TEST(ControlPlane, BytesThatAreNotOursAreBlamedOnTheirSender) {
  WithRankByHand world(3, 10s);
  const std::vector<std::byte> garbage(100);
  world.last->link.socket().send_all(garbage, soon());
  expect_all(world.jobs, ErrorCode::kPeerLost, 2, "rank 2");
}

TEST(ControlPlane, AbortEndsAllWithTheSameWords) {
  LoopbackJob setup(3);
  auto jobs = setup.join_all();
  jobs[1].control->abort("enough");
  EXPECT_TRUE(jobs[1].control->latch().tripped());
  expect_all(jobs, ErrorCode::kAborted, 1, "aborted: enough");
}

TEST(ControlPlane, AbortIsHeardEvenIfTheRankEndsAtOnce) {
  LoopbackJob setup(3);
  auto jobs = setup.join_all();
  jobs[2].control->abort("enough");
  jobs.pop_back();
  expect_all(jobs, ErrorCode::kAborted, 2, "aborted: enough");
}

// Its last word has to pass from the member to the centre in the same process.
TEST(ControlPlane, AbortIsHeardEvenIfTheRankOfTheCentreEndsAtOnce) {
  for (int round = 0; round < 100 && !HasFailure(); ++round) {
    LoopbackJob setup(2);
    auto jobs = setup.join_all();
    jobs[0].control->abort("enough");
    jobs.erase(jobs.begin());
    expect_all(jobs, ErrorCode::kAborted, 0, "aborted: enough");
  }
}

TEST(ControlPlane, AFailureOfOnesOwnIsTheCauseForAll) {
  LoopbackJob setup(3);
  auto jobs = setup.join_all();
  const Error error =
      error_of([&] { jobs[1].control->fail(Error(ErrorCode::kNonFinite, "NaN in bucket 7")); });
  EXPECT_EQ(error.code(), ErrorCode::kNonFinite);
  expect_all(jobs, ErrorCode::kNonFinite, 1, "NaN in bucket 7");
}

TEST(ControlPlane, WhoIsOutOfDescriptorsIsLostAloneWhereTheOthersSurvive) {
  LoopbackJob setup(3);
  std::vector<JoinedJob> jobs(3);
  run_ranks(3, [&](int rank) {
    JobOptions options = setup.options(rank);
    options.survives = true;
    jobs[rank] = rank == 0 ? join_job(options, std::move(setup.listener)) : join_job(options);
  });
  const Error own = error_of([&] {
    jobs[1].control->fail(Error(ErrorCode::kIo, "opening a TCP socket: Too many open files"));
  });
  EXPECT_EQ(own.code(), ErrorCode::kIo);
  EXPECT_EQ(own.rank(), 1);
  EXPECT_FALSE(jobs[1].control->survives(own));
  for (const int rank : {0, 2}) {
    const Error seen = wait_for_failure(jobs[rank].control->latch());
    EXPECT_EQ(seen.code(), ErrorCode::kPeerLost) << seen.what();
    EXPECT_EQ(seen.rank(), 1);
    EXPECT_THAT(seen.what(), HasSubstr("Too many open files"));
    EXPECT_TRUE(jobs[rank].control->survives(seen));
  }
}

TEST(ControlPlane, ACascadeEndsWithItsRootOnAllRanks) {
  WithRankByHand world(4, 10s);
  // Rank 3 dies; rank 2 loses it, fails and closes; ranks 1 and 0 see only their neighbours close.
  const auto errors = run_ranks(4, [&](int rank) {
    if (rank == 3) {
      world.last.reset();
    } else {
      world.jobs[rank].control->fail(Error(ErrorCode::kChannelClosed, "closed", rank + 1));
    }
  });
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(errors[rank]);
    EXPECT_EQ(errors[rank]->rank(), 3) << errors[rank]->what();
  }
  expect_all(world.jobs, ErrorCode::kPeerLost, 3, "rank 3");
}

TEST(ControlPlane, LeavingInOrderHarmsNobodyUntilSomebodyWaits) {
  LoopbackJob setup(3);
  auto jobs = setup.join_all();
  jobs.pop_back();
  for (JoinedJob& job : jobs) EXPECT_FALSE(job.control->latch().tripped());
  const Error error =
      error_of([&] { jobs[1].control->fail(Error(ErrorCode::kChannelClosed, "closed", 2)); });
  EXPECT_EQ(error.rank(), 2);
  expect_all(jobs, ErrorCode::kPeerLost, 2, "has left the job");
}

TEST(ControlPlane, GoesOnWithoutACentreThatLeft) {
  LoopbackJob setup(3, 1s);
  auto jobs = setup.join_all();
  jobs.erase(jobs.begin());
  // Whoever waits for it learns so; the rest fall back on what they saw.
  const Error left = error_of([&] {
    while (true) {  // the farewell may still be on its way
      jobs[0].control->fail(Error(ErrorCode::kChannelClosed, "closed", 0));
    }
  });
  EXPECT_EQ(left.rank(), 0);
  EXPECT_THAT(left.what(), HasSubstr("has left the job"));
  EXPECT_FALSE(jobs[1].control->latch().tripped());
  const Error own =
      error_of([&] { jobs[1].control->fail(Error(ErrorCode::kChannelClosed, "closed", 1)); });
  EXPECT_EQ(own.rank(), 1);
  EXPECT_EQ(own.message(), "closed");
}

TEST(ControlPlane, ACentreThatLeftWhileOthersWaitForItIsNamed) {
  LoopbackJob setup(2, 500ms);
  auto jobs = setup.join_all();
  const auto at = [](std::uint64_t sequence, bool inside) {
    return [=] { return std::vector{Progress{0, sequence, inside, "barrier"}}; };
  };
  jobs[0].control->progress_book().add(&setup, at(4, false));
  jobs[0].control->progress_book().remove(&setup);
  jobs[0] = JoinedJob();
  jobs.erase(jobs.begin());
  jobs[0].control->progress_book().add(&setup, at(5, true));
  expect_all(jobs, ErrorCode::kPeerLost, 0, "has left the job after collective 4");
}

// For its message, say: of such groups of two the one that left may have heard nothing.
TEST(ControlPlane, ACentreThatLeftIsNamedInAGroupThatItNeverEntered) {
  LoopbackJob setup(2, 500ms);
  auto jobs = setup.join_all();
  jobs.erase(jobs.begin());
  jobs[0].control->progress_book().add(
      &setup, [] { return std::vector{Progress{7, 1, true, "message", 0}}; });
  expect_all(jobs, ErrorCode::kPeerLost, 0, "has left the job");
}

TEST(ControlPlane, DifferentCollectivesAreFoundByHeartbeats) {
  LoopbackJob setup(3, 1s);
  auto jobs = setup.join_all();
  for (int rank = 0; rank < 3; ++rank) {
    const std::string what = rank == 1 ? "all_reduce sum f32 x 100" : "all_reduce sum f32 x 101";
    jobs[rank].control->progress_book().add(&setup, [what] {
      return std::vector{Progress{0, 17, true, what}};
    });
  }
  expect_all(jobs, ErrorCode::kCollectiveMismatch, 1, "called all_reduce sum f32 x 100");
  EXPECT_THAT(jobs[0].control->latch().error()->what(),
              HasSubstr("called all_reduce sum f32 x 101, as collective 17"));
}

TEST(ControlPlane, AnOverdueCollectiveNamesTheAbsentRank) {
  WithRankByHand world(3, 10s);
  for (JoinedJob& job : world.jobs) {
    job.control->progress_book().add(&world, [] {
      return std::vector{Progress{0, 17, true, "all_reduce"}};
    });
  }
  const auto errors = run_ranks(2, [&](int rank) {
    if (rank == 0) {
      world.jobs[0].control->fail(Error(ErrorCode::kTimeout, "waiting for rank 1", 1));
    }
    // Rank 2 says where it is only when the centre asks.
    Link& link = world.last->link;
    while (link.receive(soon()).kind != MessageKind::kPing) {
    }
    const std::vector<Progress> progress = {{0, 16, false, "all_reduce"}};
    link.send(MessageKind::kHeartbeat, encode(Pulse{world.last->tag, progress}), soon());
  });
  ASSERT_TRUE(errors[0]);
  EXPECT_EQ(errors[0]->rank(), 2);
  expect_all(world.jobs, ErrorCode::kTimeout, 2, "has not entered collective 17 (all_reduce)");
}

// A centre by hand: it lets rank 1 in; what it says then, at once or later, is up to the test.
struct WithCentreByHand {
  explicit WithCentreByHand(std::chrono::milliseconds timeout = 10s,
                            std::span<const std::byte> at_once = {}) {
    const Socket listener = listen_tcp(SocketAddress::loopback_v4());
    JobOptions options;
    options.rank = 1;
    options.world_size = 2;
    options.master_port = listener.local_address().port();
    options.timeout = timeout;
    const auto errors = run_ranks(2, [&](int rank) {
      if (rank == 1) {
        job = join_job(options);
        return;
      }
      link.emplace(accept(listener, soon()), kMaxRosterBody);
      const Identity identity{"lockstep", 0, random_member_id(), 0, ""};
      server_handshake(link->socket(), identity, Purpose::kRendezvous, soon());
      const auto join = decode_join(link->receive(soon()).body);
      ASSERT_TRUE(join);
      RosterMessage roster;
      roster.centre.rank = 0;
      roster.centre.hostname = "node0";
      roster.timeout = timeout;
      roster.roster = {join->card, join->card};
      roster.roster[0].rank = 0;
      roster.roster[0].id = random_member_id();
      auto bytes = frame(MessageKind::kRoster, encode(roster));
      bytes.insert(bytes.end(), at_once.begin(), at_once.end());
      link->socket().send_all(bytes, soon());
    });
    for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
  }
  Error failure() { return wait_for_failure(job.control->latch()); }

  std::optional<Link> link;
  JoinedJob job;
};

TEST(ControlPlane, ASilentCentreIsNamed) {
  WithCentreByHand world(300ms);
  const Error error = world.failure();
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(error.rank(), 0);
  EXPECT_THAT(error.what(), HasSubstr("rank 0 (node0, pid 0) has been silent for 300ms"));
  // The rank's last word to the centre says so too, in case that it wakes.
  std::optional<Report> report;
  while (!report) {
    const Message message = world.link->receive(soon());
    if (message.kind == MessageKind::kReport) report = decode_report(message.body);
  }
  EXPECT_EQ(report->error.rank(), 0);
}

TEST(ControlPlane, ADeadCentreIsNamedAtOnce) {
  WithCentreByHand world;
  world.link.reset();
  EXPECT_EQ(world.failure().rank(), 0);
  EXPECT_THAT(world.failure().what(), HasSubstr("rank 0 (node0, pid 0) died"));
}

TEST(ControlPlane, AMalformedVerdictIsBlamedOnTheCentre) {
  WithCentreByHand world;
  world.link->send(MessageKind::kVerdict, {}, soon());
  EXPECT_EQ(world.failure().rank(), 0);
  EXPECT_THAT(world.failure().what(), HasSubstr("sent a malformed verdict"));
}

TEST(ControlPlane, AVerdictRightBehindTheRosterIsHeard) {
  const Error verdict(ErrorCode::kPeerLost, "rank 0 died", 0);
  const auto start = Deadline::Clock::now();
  WithCentreByHand world(10s, frame(MessageKind::kVerdict, encode_wire_error(verdict)));
  EXPECT_STREQ(world.failure().what(), verdict.what());
  EXPECT_LT(Deadline::Clock::now() - start, 5s);  // not when the centre is found silent
}

TEST(ControlPlane, APingIsAnsweredWithProgress) {
  WithCentreByHand world;
  const std::vector<Progress> progress = {{3, 9, true, "barrier"}};
  world.job.control->progress_book().add(&world, [&] { return progress; });
  world.link->send(MessageKind::kPing, {}, soon());
  while (decode_pulse(world.link->receive(soon()).body)->progress != progress) {
  }
  world.job.control->progress_book().remove(&world);
}

TEST(ControlPlane, LinesOfRankZeroReachTheCentreInOrder) {
  WithRankByHand world(3, 10s);
  ControlPlane& centre = *world.jobs[0].control;
  world.jobs[1].control->tell("not for rank 1 to tell");
  const std::string body = "nor for rank 2";
  world.last->link.send(MessageKind::kLine, std::as_bytes(std::span(body)), soon());
  std::vector<std::string> told;
  for (int i = 0; i < 100; ++i) told.push_back(std::to_string(i) + std::string(1000, 'x'));
  for (const std::string& line : told) centre.tell(line);
  std::vector<std::string> heard;
  for (const Deadline deadline = soon(); heard.size() < told.size() && !deadline.expired();) {
    for (std::string& line : centre.take_lines()) heard.push_back(std::move(line));
  }
  EXPECT_EQ(heard, told);
  EXPECT_FALSE(centre.latch().tripped());
}

// The first tells where a run began, the last how far it is.
TEST(ControlPlane, OfTooManyLinesTheFirstAndTheLastOnesAreKept) {
  WithRankByHand world(3, 10s);
  ControlPlane& centre = *world.jobs[0].control;
  constexpr int kLines = 30'000;
  for (int i = 0; i < kLines; ++i) centre.tell(std::to_string(i));
  centre.abort("enough");  // the others hear it after the centre has heard the lines
  const Deadline deadline = soon();
  const FailureLatch& latch = world.jobs[1].control->latch();
  while (!latch.tripped() && !deadline.expired()) std::this_thread::yield();
  std::vector<std::string> heard;
  while ((heard.empty() || heard.back() != std::to_string(kLines - 1)) && !deadline.expired()) {
    for (std::string& line : centre.take_lines()) heard.push_back(std::move(line));
  }
  ASSERT_FALSE(heard.empty());
  EXPECT_EQ(heard.front(), "0");
  EXPECT_EQ(heard.back(), std::to_string(kLines - 1));
  EXPECT_LT(heard.size(), static_cast<std::size_t>(kLines));
}

TEST(ControlPlane, ALauncherAtTheCentreRelaysVerdicts) {
  LoopbackJob setup(3);
  const auto server = setup.serve();
  std::vector<JoinedJob> jobs(3);
  run_ranks(3, [&](int rank) {
    JobOptions options = setup.options(rank);
    options.hosted = true;
    jobs[rank] = join_job(options);
  });
  jobs[0].control->abort("enough");
  expect_all(jobs, ErrorCode::kAborted, 0, "aborted: enough");
}

TEST(ControlPlane, WithoutAVerdictFailFallsBackOnWhatItSaw) {
  // The centre hears the report but never decides: the wait ends at the timeout.
  WithCentreByHand world(200ms);
  ControlPlane& control = *world.job.control;
  const Error error = error_of([&] { control.fail(Error(ErrorCode::kIo, "as I saw it", 3)); });
  // Either its own view or, as late, the silence of the centre.
  EXPECT_TRUE(error.rank() == 3 || error.rank() == 0) << error.what();
}

TEST(ProgressBook, ListsTheLivingFirstAndForgetsTheLongGone) {
  ProgressBook book;
  for (std::uint32_t group = 0; group < 1000; ++group) {
    book.add(&group, [=] { return std::vector<Progress>{{group, 1, false, ""}}; });
    book.remove(&group);
  }
  book.add(&book, [] { return std::vector<Progress>{{7777, 1, true, ""}}; });
  const auto all = book.all();
  ASSERT_LE(all.size(), std::size_t{kMaxGroups});
  EXPECT_EQ(all[0].group, 7777u);
  EXPECT_EQ(all[1].group, 999u);
}

TEST(ControlPlane, FailFromManyThreadsEndsAllWithOneError) {
  LoopbackJob setup(2);
  auto jobs = setup.join_all();
  const auto errors = run_ranks(8, [&](int thread) {
    jobs[thread % 2].control->fail(
        Error(ErrorCode::kIo, "thread " + std::to_string(thread), thread % 2));
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_STREQ(error->what(), errors[0]->what());
  }
}

TEST(ControlPlane, ASourceThatWasRemovedIsNotCalledAgain) {
  LoopbackJob setup(2, 200ms);
  auto jobs = setup.join_all();
  for (int i = 0; i < 100; ++i) {
    auto alive = std::make_unique<int>(i);
    jobs[1].control->progress_book().add(&alive, [&alive] {
      EXPECT_TRUE(alive);
      return std::vector{Progress{}};
    });
    jobs[1].control->progress_book().remove(&alive);
    alive.reset();
  }
}

TEST(ControlPlane, ManyJobsLeaveNoDescriptorBehind) {
  const Descriptor before(::dup(STDERR_FILENO));
  for (int i = 0; i < 300; ++i) {
    LoopbackJob setup(2);
    auto jobs = setup.join_all();
    if (i % 3 == 0) jobs[i % 2].control->abort("enough");
    if (i % 3 == 1) jobs.erase(jobs.begin());
  }
  const Descriptor after(::dup(STDERR_FILENO));
  EXPECT_EQ(after.get(), before.get() + 1);
}

}  // namespace
}  // namespace lockstep::control_plane_test
