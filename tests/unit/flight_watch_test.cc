#include "lockstep/run/flight_watch.h"

#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

#include "lockstep/train/run_checkpoints.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::flight_watch_test {
namespace {

using namespace std::chrono_literals;
using namespace test;

// What is in the folder of a run when its only rank was told to write within this time.
bool is_written_within(std::chrono::nanoseconds timeout) {
  const TemporaryFolder folder;
  const auto recorder = std::make_shared<FlightRecorder>();
  FlightWatch watch;
  watch.add(recorder, folder.path(), timeout);
  watch.write(recorder, "a loss");
  watch.finish();
  watch.remove(recorder);
  return std::filesystem::exists(folder.path() + "/" + kFlightFolderOfRun);
}

TEST(FlightWatch, WritesToTheFolderOfTheRun) { EXPECT_TRUE(is_written_within(1h)); }

// As when the process was stopped before it could write, and the job ended without it.
TEST(FlightWatch, WhatIsTooLateIsNotWritten) { EXPECT_FALSE(is_written_within(0s)); }

}  // namespace
}  // namespace lockstep::flight_watch_test
