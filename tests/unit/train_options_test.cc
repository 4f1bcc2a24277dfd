#include <gtest/gtest.h>

#include "lockstep/run/options.h"

namespace lockstep::train_options_test {
namespace {

using namespace std::chrono_literals;

TEST(TrainOptions, BetweenCheckpointsAreStepsOrTime) {
  EXPECT_EQ(parse_save_every("500"), (SaveEvery{500, 0s}));
  EXPECT_EQ(parse_save_every("0"), SaveEvery{});
  EXPECT_EQ(parse_save_every("90s"), (SaveEvery{0, 90s}));
  EXPECT_EQ(parse_save_every("10m"), kDefaultSaveEvery);
  EXPECT_EQ(parse_save_every("2h"), (SaveEvery{0, 2h}));
  for (const char* text : {"", "m", "-1", "0m", "10 m", "10d", "1e3", "9999999999h"}) {
    EXPECT_FALSE(parse_save_every(text)) << text;
  }
  for (const char* text : {"500", "0", "90s", "10m", "2h"}) {
    EXPECT_EQ(to_string(*parse_save_every(text)), text);
  }
}

}  // namespace
}  // namespace lockstep::train_options_test
