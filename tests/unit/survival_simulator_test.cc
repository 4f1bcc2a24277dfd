#include "tests/support/survival_simulator.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "tests/support/build_kind.h"

namespace lockstep::survival_simulator_test {
namespace {

using test::kSanitizers;
using test::SurvivalSimulator;

std::uint64_t number_from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// LOCKSTEP_SCHEDULES=N runs N of them, LOCKSTEP_SEED=S begins with that seed; a single one is told
// event by event.
TEST(SurvivalSimulator, EveryScheduleKeepsItsInvariants) {
  const std::uint64_t first = number_from_environment("LOCKSTEP_SEED", 1);
  const std::uint64_t count =
      number_from_environment("LOCKSTEP_SCHEDULES", kSanitizers.empty() ? 2'000 : 500);
  SurvivalSimulator::Counts total;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    SurvivalSimulator::Options options = SurvivalSimulator::drawn(seed);
    options.trace = count == 1;
    SurvivalSimulator simulator(options);
    EXPECT_EQ(simulator.run(), "")
        << "replay with LOCKSTEP_SEED=" << seed << " LOCKSTEP_SCHEDULES=1";
    if (HasFailure()) return;
    total.generations += simulator.counts().generations;
    total.commits += simulator.counts().commits;
  }
  RecordProperty("generations", std::to_string(total.generations));
  RecordProperty("commits", std::to_string(total.commits));
}

}  // namespace
}  // namespace lockstep::survival_simulator_test
