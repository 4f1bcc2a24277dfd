#include "tests/support/survival_simulator.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/support/build_kind.h"
#include "tests/support/seeds.h"

namespace lockstep::survival_simulator_test {
namespace {

using test::kSanitizers;
using test::SurvivalSimulator;

#ifdef __OPTIMIZE__
constexpr std::uint64_t kSchedules = kSanitizers.empty() ? 100'000 : 1'000;
#else
constexpr std::uint64_t kSchedules = 2'000;
#endif

// A single one is told event by event.
TEST(SurvivalSimulator, EveryScheduleKeepsItsInvariants) {
  const test::Seeds seeds(kSchedules);
  SurvivalSimulator::Counts total;
  for (std::uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    SurvivalSimulator::Options options = SurvivalSimulator::drawn(seed);
    options.trace = seeds.count == 1;
    SurvivalSimulator simulator(options);
    ASSERT_EQ(simulator.run(), "")
        << "replay with LOCKSTEP_SEED=" << seed << " LOCKSTEP_SCHEDULES=1";
    total.generations += simulator.counts().generations;
    total.commits += simulator.counts().commits;
    total.finished += simulator.counts().finished > 0 ? 1 : 0;
  }
  RecordProperty("generations", std::to_string(total.generations));
  RecordProperty("commits", std::to_string(total.commits));
  RecordProperty("finished runs", std::to_string(total.finished));
  if (seeds.count >= 1'000) {  // the faults do what they are for, and the job survives them
    EXPECT_GT(total.generations, 2 * seeds.count);
    EXPECT_GT(total.finished, seeds.count * 9 / 10);
  }
}

// Found by ten million schedules: a centre whose own worker was lost, one that slept beside a
// member that slept, a call to a process that stood still, a link that its caller had given up, a
// job that formed slowly.
TEST(SurvivalSimulator, SchedulesThatWentWrongOnce) {
  for (const std::uint64_t seed :
       {1'002'208'665u, 1'002'844'284u, 1'003'474'894u, 1'009'098'096u, 1'006'010'945u,
        1'002'905'325u, 1'002'996'929u, 1'003'055'661u, 1'008'077'208u, 1'001'870'163u,
        1'007'965'786u, 1'008'706'378u, 3'100'153'866u, 3'200'638'053u, 3'300'297'819u, 20'195'855u,
        41'731'450u, 45'188'420u, 45'720'872u}) {
    SurvivalSimulator simulator(SurvivalSimulator::drawn(seed));
    EXPECT_EQ(simulator.run(), "")
        << "replay with LOCKSTEP_SEED=" << seed << " LOCKSTEP_SCHEDULES=1";
  }
}

TEST(SurvivalSimulator, ASeedReplaysExactly) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    std::vector<std::pair<std::uint64_t, std::int64_t>> seen;
    for (int run = 0; run < 2; ++run) {
      SurvivalSimulator simulator(SurvivalSimulator::drawn(seed));
      EXPECT_EQ(simulator.run(), "");
      seen.emplace_back(simulator.counts().events, simulator.now().time_since_epoch().count());
    }
    EXPECT_EQ(seen[0], seen[1]);
  }
}

// Without faults nothing is lost: one generation, and every worker does every step once.
TEST(SurvivalSimulator, AnUndisturbedRunHasOneGeneration) {
  for (const auto centre :
       {SurvivalSimulator::CentreKind::kLauncher, SurvivalSimulator::CentreKind::kRank,
        SurvivalSimulator::CentreKind::kHome}) {
    SurvivalSimulator simulator({.members = 5, .centre = centre, .steps = 40, .faults = 0});
    EXPECT_EQ(simulator.run(), "");
    EXPECT_EQ(simulator.counts().generations, 1u);
    EXPECT_EQ(simulator.counts().commits, 5u * 40u);
    EXPECT_EQ(simulator.counts().finished, 5u);
  }
}

}  // namespace
}  // namespace lockstep::survival_simulator_test
