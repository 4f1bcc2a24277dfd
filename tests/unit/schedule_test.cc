#include "lockstep/model/schedule.h"

#include <gtest/gtest.h>

namespace lockstep::schedule_test {
namespace {

TEST(Schedule, WarmsUpLinearly) {
  for (const Decay decay : {Decay::kCosine, Decay::kLinear, Decay::kConstant}) {
    const Schedule schedule = {.decay = decay, .peak = 0.8, .floor = 0.1, .warmup = 4, .steps = 20};
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 0), 0.2);
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 1), 0.4);
    EXPECT_DOUBLE_EQ(learning_rate(schedule, 3), 0.8);
  }
}

TEST(Schedule, DecaysFromThePeakToTheFloor) {
  Schedule schedule = {
      .decay = Decay::kCosine, .peak = 1.0, .floor = 0.1, .warmup = 1, .steps = 11};
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 0), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 5), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 10), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1000), 0.1);
  for (int step = 1; step < 11; ++step) {
    EXPECT_LT(learning_rate(schedule, step), learning_rate(schedule, step - 1));
  }
  schedule.decay = Decay::kLinear;
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 5), 0.55);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1), 0.91);
  EXPECT_DOUBLE_EQ(learning_rate(schedule, 1000), 0.1);
  schedule.decay = Decay::kConstant;
  EXPECT_EQ(learning_rate(schedule, 1000), 1.0);
}

TEST(Schedule, ShortRunsDoNotDivideByZero) {
  for (const Decay decay : {Decay::kCosine, Decay::kLinear}) {
    EXPECT_EQ(learning_rate({.decay = decay, .peak = 1.0, .steps = 1}, 0), 1.0);
    EXPECT_EQ(learning_rate({.decay = decay, .peak = 1.0, .warmup = 5, .steps = 5}, 4), 1.0);
    EXPECT_EQ(learning_rate({.decay = decay, .peak = 1.0, .warmup = 9, .steps = 5}, 4), 5.0 / 9.0);
  }
}

TEST(Schedule, Names) {
  EXPECT_EQ(parse_decay("cosine"), Decay::kCosine);
  EXPECT_EQ(parse_decay("linear"), Decay::kLinear);
  EXPECT_EQ(parse_decay("constant"), Decay::kConstant);
  EXPECT_FALSE(parse_decay("step"));
}

}  // namespace
}  // namespace lockstep::schedule_test
