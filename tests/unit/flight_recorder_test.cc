#include "lockstep/comm/flight_recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <stdexcept>
#include <thread>

#include "lockstep/comm/call.h"
#include "lockstep/comm/communicator.h"
#include "tests/support/groups.h"

namespace lockstep::flight_recorder_test {
namespace {

FlightCall call(std::uint64_t sequence) {
  MeshFrame frame;
  frame.kind = static_cast<std::uint8_t>(Collective::kAllReduce);
  frame.sequence = sequence;
  frame.count = 3 * sequence;
  return {frame, 0};
}

TEST(FlightRecorder, ACallKeepsWhatItsMessagesHaveInCommon) {
  MeshFrame frame{.kind = 1,
                  .type = 2,
                  .op = 3,
                  .algorithm = 4,
                  .generation = 5,
                  .group = 6,
                  .sequence = 7,
                  .count = 8,
                  .shape = 9,
                  .step = 10,
                  .bucket = 11};
  EXPECT_EQ(FlightCall(frame, 5).frame(), frame);
  frame.generation = 0xffffffff;
  frame.group = frame.step = frame.bucket = 0xfffffffe;
  frame.kind = frame.type = frame.op = frame.algorithm = 0xff;
  EXPECT_EQ(FlightCall(frame, 0xffffffff).frame(), frame);
}

TEST(FlightRecorder, KeepsTheLastThousandInOrder) {
  FlightRecorder recorder;
  FlightTrack* track = recorder.take_track(0);
  constexpr std::uint64_t kAll = 3000;
  for (std::uint64_t i = 1; i <= kAll; ++i) {
    track->ring.leave(track->ring.enter(call(i), recorder.ticks()), recorder.ticks(), 0);
  }
  const FlightSnapshot snapshot = recorder.snapshot();
  ASSERT_GE(snapshot.collectives.size(), 1000U);
  EXPECT_EQ(snapshot.collectives.size(), FlightRing<FlightCall>::kSlots);
  std::uint64_t expected = kAll - FlightRing<FlightCall>::kSlots;
  for (const auto& each : snapshot.collectives) {
    EXPECT_EQ(each.call.sequence, ++expected);
    EXPECT_EQ(each.call.count, 3 * expected);
    EXPECT_GE(each.end, each.begin);
    EXPECT_LE(each.end, snapshot.taken);
  }
}

TEST(FlightRecorder, TimesAreThoseOfTheSteadyClock) {
  FlightRecorder recorder;
  const auto before = static_cast<std::int64_t>(FlightClock::read_clock());
  { const PhaseRecord phase(recorder, "data", 7, 3); }
  const auto after = static_cast<std::int64_t>(FlightClock::read_clock());
  const FlightSnapshot snapshot = recorder.snapshot();
  ASSERT_EQ(snapshot.phases.size(), 1U);
  // The rate of the counter is measured over the recorder's short life.
  constexpr std::int64_t kSlack = 1'000'000;
  EXPECT_GE(snapshot.phases[0].begin, before - kSlack);
  EXPECT_LE(snapshot.phases[0].end, after + kSlack);
  EXPECT_EQ(snapshot.phases[0].name, "data");
  EXPECT_EQ(snapshot.phases[0].step, 7);
  EXPECT_EQ(snapshot.phases[0].lane, 3);
}

TEST(FlightRecorder, APhaseThatAnExceptionEndsSaysSo) {
  FlightRecorder recorder;
  try {
    const PhaseRecord outer(recorder, "save", 1);
    { const PhaseRecord inner(recorder, "verify", 1); }
    throw std::runtime_error("enough");
  } catch (const std::runtime_error&) {
    const PhaseRecord later(recorder, "regroup", 1);
  }
  const PhaseRecord open(recorder, "a name that is far too long for it", 2);
  const FlightSnapshot snapshot = recorder.snapshot();
  ASSERT_EQ(snapshot.phases.size(), 4U);
  EXPECT_TRUE(snapshot.phases[0].failed);
  EXPECT_FALSE(snapshot.phases[1].failed);
  EXPECT_FALSE(snapshot.phases[2].failed);
  EXPECT_EQ(snapshot.phases[3].end, 0);
  EXPECT_EQ(snapshot.phases[3].name, "a name that is far too ");
}

TEST(FlightRecorder, AReaderNeverSeesHalfARecord) {
  FlightRecorder recorder;
  FlightTrack* track = recorder.take_track(0);
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (std::uint64_t i = 1; !stop; ++i) {
      track->ring.leave(track->ring.enter(call(i), recorder.ticks()), recorder.ticks(), 0);
    }
  });
  std::size_t seen = 0;
  while (seen < 20000) {
    std::uint64_t before = 0;
    for (const auto& each : recorder.snapshot().collectives) {
      ASSERT_EQ(each.call.count, 3 * each.call.sequence);
      ASSERT_NE(each.call.sequence, before);
      before = each.call.sequence;
      ++seen;
    }
  }
  stop = true;
  writer.join();
}

TEST(FlightRecorder, AGroupFindsItsTrackAgainAndTheOldestOneIsGivenAway) {
  FlightRecorder recorder;
  FlightTrack* first = recorder.take_track(0);
  FlightTrack* second = recorder.take_track(1);
  first->ring.enter(call(1), recorder.ticks());
  EXPECT_NE(first, second);
  recorder.drop_track(first);
  recorder.drop_track(second);
  EXPECT_EQ(recorder.take_track(1), second);
  EXPECT_EQ(recorder.take_track(0), first);
  EXPECT_EQ(first->ring.count(), 1U);
  EXPECT_NE(recorder.take_track(2), nullptr);
  EXPECT_NE(recorder.take_track(3), nullptr);
  EXPECT_EQ(recorder.take_track(4), nullptr);
  EXPECT_EQ(recorder.snapshot().left_out, 1U);
  recorder.drop_track(first);
  EXPECT_EQ(recorder.take_track(4), first);
}

TEST(FlightRecorder, ALauncherReadsWhatAKilledChildDid) {
  auto [recorder, file] = FlightRecorder::share();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    FlightRecorder own{Descriptor(::dup(file.get()))};
    own.set_place(2, 4, 5, 77);
    own.set_last_words("I am done for");
    const PhaseRecord phase(own, "optimizer", 12);
    FlightTrack* track = own.take_track(0);
    track->ring.enter(call(9), own.ticks());
    track->waits.set(1);
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  const FlightSnapshot snapshot = recorder->snapshot();
  EXPECT_EQ(snapshot.pid, child);
  EXPECT_EQ(snapshot.rank, 2);
  EXPECT_EQ(snapshot.world_size, 4);
  EXPECT_EQ(snapshot.generation, 5U);
  EXPECT_EQ(snapshot.tag, 77U);
  EXPECT_EQ(snapshot.last_words, "I am done for");
  ASSERT_EQ(snapshot.phases.size(), 1U);
  EXPECT_EQ(snapshot.phases[0].name, "optimizer");
  EXPECT_EQ(snapshot.phases[0].end, 0);
  EXPECT_EQ(snapshot.phases[0].generation, 5U);
  ASSERT_EQ(snapshot.collectives.size(), 1U);
  EXPECT_EQ(snapshot.collectives[0].waited_for, 1);
}

// A rank that crashes may leave anything in the memory that its launcher reads.
TEST(FlightRecorder, ATimeThatCannotBeIsNow) {
  auto [recorder, file] = FlightRecorder::share();
  FlightTrack* track = recorder->take_track(0);
  track->ring.enter(call(1), 1);
  // As if the recorder had begun long ago, and its counter had hardly moved since.
  struct Begin {
    std::uint64_t mark, counter, ticks, clock;
  } begin{};
  ASSERT_EQ(::pread(file.get(), &begin, sizeof begin, 0), ssize_t{sizeof begin});
  ASSERT_LE(begin.clock, FlightClock::read_clock());
  begin.ticks = recorder->ticks() - 1;
  begin.clock = 0;
  ASSERT_EQ(::pwrite(file.get(), &begin, sizeof begin, 0), ssize_t{sizeof begin});
  const FlightSnapshot snapshot = recorder->snapshot();
  ASSERT_EQ(snapshot.collectives.size(), 1U);
  EXPECT_EQ(snapshot.collectives[0].begin, snapshot.taken);
}

TEST(FlightRecorder, AWriterThatDiedInTheMiddleStopsNoReader) {
  struct Pair {
    std::uint64_t version = 1;  // odd: being written
    std::array<std::uint64_t, 2> words{};
  };
  static_assert(sizeof(SeqLock<std::array<std::uint64_t, 2>>) == sizeof(Pair));
  Pair torn;
  const auto& lock = *reinterpret_cast<const SeqLock<std::array<std::uint64_t, 2>>*>(&torn);
  EXPECT_FALSE(lock.try_load());
}

TEST(WaitNote, TellsTheLongestWaitOfACollective) {
  WaitNote note;
  EXPECT_EQ(note.rank(), -1);
  EXPECT_FALSE(note.noted());
  note.set(3);
  EXPECT_EQ(note.rank(), 3);
  while (note.waited() < 5'000'000) std::this_thread::yield();
  note.set(0);
  note.set(-1);
  EXPECT_EQ(note.rank(), -1);
  ASSERT_TRUE(note.noted());
  const WaitNote::Longest longest = note.take_longest();
  EXPECT_EQ(longest.rank, 3);
  EXPECT_GE(longest.nanoseconds, 5'000'000U);
  EXPECT_FALSE(note.noted());
}

TEST(CollectiveEnd, SurvivesPacking) {
  for (const bool failed : {false, true}) {
    for (const int rank : {-1, 0, 511}) {
      const CollectiveEnd end =
          unpack_end(pack({.failed = failed, .longest = {rank, rank < 0 ? 0U : 123'456'789U}}));
      EXPECT_EQ(end.failed, failed);
      EXPECT_EQ(end.longest.rank, rank);
      EXPECT_EQ(end.longest.nanoseconds, rank < 0 ? 0U : 123'456'789U);
    }
  }
}

// A rank that comes late is the one that the other waited for; a failed collective says so.
TEST(CommunicatorRecords, CollectivesWithWhomTheyWaitedFor) {
  for (const auto medium : {test::GroupMedium::kLocal, test::GroupMedium::kTcp}) {
    test::Group group({.medium = medium, .world_size = 2, .faults = {}});
    // The other rank stands in its n-th collective and waits for rank 1, with a wait that is noted.
    const auto waits = [&](std::size_t n) {
      const auto all = group[0].flight().snapshot().collectives;
      return all.size() == n && all.back().waited_for == 1 && all.back().waited > 1'000'000;
    };
    const auto body = [&](int rank) {
      std::vector<float> data(1000, 1);
      for (int step = 1; step <= 3; ++step) {
        while (rank == 1 && !waits(static_cast<std::size_t>(step))) std::this_thread::yield();
        CallOptions options;
        options.step = static_cast<std::uint32_t>(step);
        group[rank].all_reduce(std::span(data), ReduceOp::kSum, options);
      }
    };
    std::thread other([&] { body(1); });
    body(0);
    other.join();
    const FlightSnapshot patient = group[0].flight().snapshot();
    ASSERT_EQ(patient.collectives.size(), 3U);
    for (std::size_t i = 0; i < 3; ++i) {
      const auto& each = patient.collectives[i];
      EXPECT_EQ(each.call.sequence, i + 1);
      EXPECT_EQ(each.call.step, i + 1);
      EXPECT_EQ(each.call.count, 1000U);
      EXPECT_FALSE(each.failed);
      EXPECT_EQ(each.waited_for, 1);
      EXPECT_GT(each.waited, 1'000'000);
      EXPECT_GE(each.end - each.begin, each.waited);
    }
    std::thread fails([&] { EXPECT_THROW(group[0].barrier(), Error); });
    while (!waits(4)) std::this_thread::yield();
    group[1].abort("enough");
    fails.join();
    const auto last = group[0].flight().snapshot().collectives.back();
    EXPECT_TRUE(last.failed);
    EXPECT_EQ(last.waited_for, 1);
  }
}

TEST(CommunicatorRecords, GroupsHaveTracksOfTheirOwn) {
  test::Group group({.world_size = 2, .faults = {}});
  const auto body = [&](int rank) {
    const auto all = group[rank].split(0, rank);
    all->barrier();
    all->barrier();
  };
  std::thread other([&] { body(1); });
  body(0);
  other.join();
  const FlightSnapshot snapshot = group[0].flight().snapshot();
  ASSERT_EQ(snapshot.collectives.size(), 3U);
  EXPECT_EQ(snapshot.collectives[0].call.group, 0U);
  EXPECT_NE(snapshot.collectives[1].call.group, 0U);
  EXPECT_EQ(snapshot.collectives[2].call.sequence, 2U);
}

}  // namespace
}  // namespace lockstep::flight_recorder_test
