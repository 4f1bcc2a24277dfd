#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/report/metrics.h"
#include "lockstep/report/progress.h"
#include "lockstep/report/run_events.h"
#include "lockstep/report/training_log.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::report_test {
namespace {

TEST(Progress, ShortNumbersAndDurations) {
  EXPECT_EQ(short_number(0), "0");
  EXPECT_EQ(short_number(999), "999");
  EXPECT_EQ(short_number(999.7), "1.00k");
  EXPECT_EQ(short_number(1234), "1.23k");
  EXPECT_EQ(short_number(45678), "45.7k");
  EXPECT_EQ(short_number(999'700), "1.00M");
  EXPECT_EQ(short_number(123'456'789), "123M");
  EXPECT_EQ(short_duration(-3), "0s");
  EXPECT_EQ(short_duration(59.4), "59s");
  EXPECT_EQ(short_duration(200), "3m20s");
  EXPECT_EQ(short_duration(7500), "2h05m");
}

TEST(Progress, ABarOfEveryWidth) {
  const RunProgress progress{50, 200, 1.5, 1.75, {}, 12'345, 90};
  EXPECT_EQ(format_bar(progress, 80),
            "[=====                ] 50/200  loss 1.5000  val 1.7500  12.3k tok/s  1m30s left");
  for (int width = 1; width < 200; ++width) {
    EXPECT_LE(format_bar(progress, width).size(), static_cast<std::size_t>(width));
  }
  EXPECT_EQ(format_bar({200, 200, 1, {}, 1, 0}, 100).find(' '),
            format_bar({200, 200, 1, {}, 1, 0}, 100).find("] ") + 1);
  EXPECT_EQ(format_plain(progress),
            "step 50/200  loss 1.5000  val 1.7500  12.3k tok/s  1m30s left");
}

TEST(Progress, ABarClearsTheOneBeforeHoweverTheTerminalHasChanged) {
  EXPECT_EQ(over_bar(0, 80), "\r");
  EXPECT_EQ(over_bar(79, 80), "\r");
  EXPECT_EQ(over_bar(79, 120), "\r");
  EXPECT_EQ(over_bar(40, 40), "\r");
  EXPECT_EQ(over_bar(79, 40), "\r\x1b[1A\x1b[J");  // it is on two lines now
  EXPECT_EQ(over_bar(81, 40), "\r\x1b[2A\x1b[J");
}

TEST(Progress, PlainLinesComeByTime) {
  using namespace std::chrono_literals;
  const LinePace::Time begin{100s};
  LinePace pace;
  std::vector<std::chrono::seconds> told;
  for (auto time = 0s; time <= 150s; time += 1s) {
    if (pace.due(begin + time, false)) told.push_back(time);
  }
  EXPECT_EQ(told, (std::vector{0s, 2s, 6s, 14s, 30s, 60s, 90s, 120s, 150s}));
  EXPECT_TRUE(pace.due(begin + 151s, true));
  EXPECT_FALSE(pace.due(begin + 152s, false));
}

TEST(Progress, LanesThatMove) {
  using Lanes = std::vector<std::uint32_t>;
  EXPECT_EQ(describe_lanes(Lanes{8, 8, 8, 8}, Lanes{8, 9, 5, 10}),
            "lanes: rank 1 has 9 of 32 (was 8), rank 2 has 5 (was 8), rank 3 has 10 (was 8)");
  EXPECT_EQ(describe_lanes(Lanes{8, 8}, Lanes{8, 8}), "");
}

TEST(Progress, MeterKeepsTheLatestValidationAndTheSpeed) {
  ProgressMeter meter(10);
  StepReport report;
  report.step = 1;
  report.tokens = 100;
  report.seconds = 0.5;
  report.validation_loss = 3.0;
  meter.update(report);
  report.step = 2;
  report.validation_loss.reset();
  const RunProgress& progress = meter.update(report);
  EXPECT_EQ(progress.validation_loss, 3.0);
  EXPECT_DOUBLE_EQ(progress.tokens_per_second, 200);
  EXPECT_DOUBLE_EQ(progress.seconds_left, 4);
}

TEST(Progress, TellsTheLastValidationAndItsAccuracy) {
  RunProgress progress{50, 200, 1.5, 2.0, 0.412, 12'345, 90, 0};
  EXPECT_EQ(format_plain(progress),
            "step 50/200  loss 1.5000  val 2.0000 (41.2 %)  12.3k tok/s  1m30s left");
  EXPECT_THAT(format_bar(progress, 100),
              ::testing::EndsWith("  val 2.0000 (41.2 %)  12.3k tok/s  1m30s left"));
}

TEST(Progress, TellsHowManyWorkersThereAre) {
  RunProgress progress{50, 200, 1.5, {}, {}, 12'345, 90, 3};
  EXPECT_EQ(format_plain(progress), "step 50/200  loss 1.5000  12.3k tok/s  3 workers  1m30s left");
  EXPECT_THAT(format_bar(progress, 100),
              ::testing::EndsWith("  12.3k tok/s  3 workers  1m30s left"));
  ProgressMeter meter(10);
  StepReport report;
  report.lanes = {8};
  EXPECT_EQ(meter.update(report).workers, 0);
  report.lanes = {4, 4};
  EXPECT_EQ(meter.update(report).workers, 2);
  report.lanes = {8};
  progress.workers = meter.update(report).workers;  // alone again, which people want to know
  EXPECT_EQ(progress.workers, 1);
  EXPECT_EQ(format_plain(progress), "step 50/200  loss 1.5000  12.3k tok/s  1 worker  1m30s left");
}

TEST(Progress, AStepWithoutATimeChangesNoRate) {
  ProgressMeter meter(10);
  StepReport report;
  report.step = 1;
  report.tokens = 100;
  report.seconds = 0.5;
  EXPECT_EQ(meter.update(report).tokens_per_second, 200);
  report.seconds = 0;
  for (report.step = 2; report.step < 5; ++report.step) {
    EXPECT_EQ(meter.update(report).tokens_per_second, 200);
  }
}

TEST(Metrics, OneObjectPerStep) {
  StepReport report;
  report.step = 3;
  report.epoch = 0.5;
  report.loss = 2.0;
  report.gradient_norm = 0.25;
  report.learning_rate = 1e-3;
  report.tokens = 64;
  report.correct = 17;
  report.seconds = 0.5;
  report.lanes = {5, 3};
  auto json = nlohmann::json::parse(metrics_line(report, 2.0));
  EXPECT_EQ(json["step"], 3);
  EXPECT_EQ(json["loss"], 2.0);
  EXPECT_EQ(json["correct"], 17);
  EXPECT_EQ(json["tokens_per_s"], 128.0);
  EXPECT_EQ(json["lanes"], (std::vector<std::uint32_t>{5, 3}));
  EXPECT_FALSE(json.contains("val_loss"));
  report.validation_loss = 2.0 * std::log(2.0);
  json = nlohmann::json::parse(metrics_line(report, 2.0));
  EXPECT_DOUBLE_EQ(json["val_bits_per_byte"], 1.0);
  EXPECT_FALSE(nlohmann::json::parse(metrics_line(report, 0)).contains("val_bits_per_byte"));
}

TEST(Metrics, FileHasEveryLineAtOnce) {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/metrics.jsonl";
  MetricsFile file(path);
  file.write_event("{}");
  std::string line;
  std::ifstream reader(path);
  std::getline(reader, line);
  EXPECT_EQ(line, "{}");
  EXPECT_THROW(MetricsFile("/nonexistent/metrics.jsonl"), Error);
}

TEST(Metrics, ARunThatGoesOnKeepsTheLinesOfItsSteps) {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/metrics.jsonl";
  std::ofstream(path) << "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":";
  MetricsFile(path, 2).write_step(3, "{\"step\":3,\"again\":true}");
  std::ifstream reader(path);
  const std::string text(std::istreambuf_iterator<char>(reader), {});
  EXPECT_EQ(text, "{\"step\":1}\n{\"step\":2}\n{\"step\":3,\"again\":true}\n");
}

std::string text_of(const std::string& path) {
  std::ifstream reader(path);
  return {std::istreambuf_iterator<char>(reader), {}};
}

TEST(Metrics, AnotherProcessGoesOnAfterTheLastCompleteLine) {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/metrics.jsonl";
  const std::string before =
      "{\"step\":1}\n{\"step\":2}\n{\"event\":\"lost\",\"step\":9}\n{\"step\":3}\n";
  std::ofstream(path) << before << "{\"step\":4,\"lo";
  {
    MetricsFile file = MetricsFile::go_on(path);
    EXPECT_EQ(text_of(path), before);
    file.write_event("{\"event\":\"lost\",\"step\":3}");
    file.write_step(2, "{\"step\":2}");  // computed again: it is there
    file.write_step(3, "{\"step\":3}");
    file.write_step(4, "{\"step\":4}");
    file.write_step(4, "{\"step\":4}");
    file.write_step(5, "{\"step\":5}");
  }
  EXPECT_EQ(text_of(path),
            before + "{\"event\":\"lost\",\"step\":3}\n{\"step\":4}\n{\"step\":5}\n");
}

TEST(Metrics, NothingIsWrittenWithoutTheLease) {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/metrics.jsonl";
  bool held = true;
  const WriteGuard guard = {[&](const std::string& file) {
                              if (!held) throw Error(ErrorCode::kIo, "not " + file);
                            },
                            "me"};
  MetricsFile file(path, 0, guard);
  file.write_step(1, "{\"step\":1}");
  held = false;
  EXPECT_THROW(file.write_step(2, "{\"step\":2}"), Error);
  EXPECT_THROW(file.write_event("{}"), Error);
  EXPECT_THROW(MetricsFile::go_on(path, guard), Error);
  EXPECT_THROW(MetricsFile(path, 0, guard), Error);
  EXPECT_EQ(text_of(path), "{\"step\":1}\n");
  held = true;
  file.write_step(2, "{\"step\":2}");
  EXPECT_EQ(text_of(path), "{\"step\":1}\n{\"step\":2}\n");
}

TEST(Metrics, AFileThatIsNotThereIsMade) {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/metrics.jsonl";
  MetricsFile::go_on(path).write_step(1, "{\"step\":1}");
  EXPECT_EQ(text_of(path), "{\"step\":1}\n");
  EXPECT_THROW(MetricsFile::go_on("/nonexistent/metrics.jsonl"), Error);
}

// Somebody who may write to the folder has put a link where the file belongs.
TEST(Metrics, NoLinkIsFollowed) {
  TemporaryFolder folder;
  TemporaryFolder elsewhere;
  const std::string letter = elsewhere.path() + "/letter";
  const std::string path = folder.path() + "/metrics.jsonl";
  std::ofstream(letter) << "Dear";
  std::filesystem::create_symlink(letter, path);
  EXPECT_THROW(MetricsFile::go_on(path), Error);
  EXPECT_EQ(text_of(letter), "Dear");
  MetricsFile(path).write_step(1, "{\"step\":1}");  // its own file, in place of the link
  EXPECT_EQ(text_of(letter), "Dear");
  EXPECT_EQ(text_of(path), "{\"step\":1}\n");
}

TEST(Metrics, AResumedRunKeepsTheEventsOfItsSteps) {
  TemporaryFolder folder;
  const std::string path = folder.path() + "/metrics.jsonl";
  std::ofstream(path) << "{\"step\":1}\n{\"event\":\"lost\",\"step\":2}\n{\"step\":2}\n"
                         "{\"event\":\"lost\",\"step\":3}\n{\"step\":3}\n";
  MetricsFile(path, 2).write_step(3, "{\"step\":3,\"again\":true}");
  EXPECT_EQ(text_of(path),
            "{\"step\":1}\n{\"event\":\"lost\",\"step\":2}\n{\"step\":2}\n"
            "{\"step\":3,\"again\":true}\n");
}

RunEvent a_loss() {
  RunEvent event;
  event.step = 312;
  event.who = {"rank 2 (node7, pid 4711)"};
  event.how = "its connection closed";
  event.again = true;
  event.lanes = {11, 11, 10};
  event.seconds = 0.42;
  return event;
}

TEST(RunEvents, OneLineForPeople) {
  RunEvent event = a_loss();
  EXPECT_EQ(describe(event),
            "step 312: lost rank 2 (node7, pid 4711): its connection closed; the step is computed "
            "again by 3 workers, 10 to 11 lanes each; went on after 0.4 s");
  event.who = {"rank 0 (a)", "rank 3 (b)"};
  event.kind = RunEvent::Kind::kExpelled;
  event.how = "silent for 30s";
  event.lanes = {8, 8};
  EXPECT_EQ(describe(event),
            "step 312: rank 0 (a), rank 3 (b) are expelled: silent for 30s; the step is computed "
            "again by 2 workers, 8 lanes each; went on after 0.4 s");
  event.kind = RunEvent::Kind::kLeft;
  event.who = {"rank 1 (a)"};
  event.how = "";
  event.again = false;
  event.lanes = {32};
  EXPECT_EQ(describe(event),
            "step 312: rank 1 (a) has left; 1 worker with all 32 lanes; went on after 0.4 s");
  event.kind = RunEvent::Kind::kJoined;
  event.lanes = {1, 1};
  EXPECT_EQ(describe(event),
            "step 312: rank 1 (a) has joined; 2 workers, 1 lane each; went on after 0.4 s");
  event.kind = RunEvent::Kind::kWentBack;
  event.who.clear();
  event.how = "the moments of rank 1 are lost";
  event.back_to = 300;
  EXPECT_EQ(describe(event),
            "step 312: back to the checkpoint of step 300: the moments of rank 1 are lost; steps "
            "301 to 312 are computed again by 2 workers, 1 lane each; went on after 0.4 s");
  event.back_to = 0;
  EXPECT_THAT(describe(event), ::testing::StartsWith("step 312: back to the start"));
}

TEST(RunEvents, OneObjectForFiles) {
  const auto json = nlohmann::json::parse(metrics_line(a_loss()));
  EXPECT_EQ(json["event"], "lost");
  EXPECT_EQ(json["step"], 312);
  EXPECT_EQ(json["who"], std::vector<std::string>{"rank 2 (node7, pid 4711)"});
  EXPECT_EQ(json["how"], "its connection closed");
  EXPECT_EQ(json["again"], true);
  EXPECT_EQ(json["workers"], 3);
  EXPECT_EQ(json["lanes"], (std::vector<std::uint32_t>{11, 11, 10}));
  EXPECT_EQ(json["seconds"], 0.42);
  EXPECT_FALSE(json.contains("back_to"));
}

TEST(RunEvents, TheLifeOfARunForFiles) {
  RunStart start;
  start.step = 4;
  start.steps = 9;
  start.members = {"rank 0 (a)", "rank 1 (b)"};
  start.lanes = {1, 2};
  start.settings = {{"data", "x"}};
  auto json = nlohmann::json::parse(metrics_line(start));
  EXPECT_EQ(json["event"], "started");
  EXPECT_EQ(json["step"], 4);
  EXPECT_EQ(json["steps"], 9);
  EXPECT_EQ(json["workers"], 2);
  EXPECT_EQ(json["members"][1], "rank 1 (b)");
  EXPECT_EQ(json["settings"]["data"], "x");
  EXPECT_GT(json["time"], 1.7e9);  // seconds since 1970
  json = nlohmann::json::parse(saved_line(5, "checkpoint-5", "blake3:ab"));
  EXPECT_EQ(json["event"], "saved");
  EXPECT_EQ(json["step"], 5);
  EXPECT_EQ(json["name"], "checkpoint-5");
  EXPECT_EQ(json["hash"], "blake3:ab");
  json = nlohmann::json::parse(halted_line(6, "a \"reason\""));
  EXPECT_EQ(json["event"], "halted");
  EXPECT_EQ(json["how"], "a \"reason\"");
  json = nlohmann::json::parse(metrics_line(RunFinish{9, "done", "blake3:cd", 1.5}));
  EXPECT_EQ(json["event"], "ended");
  EXPECT_EQ(json["how"], "done");
  EXPECT_EQ(json["hash"], "blake3:cd");
  EXPECT_EQ(json["seconds"], 1.5);
}

TEST(RunEvents, AreListedAtTheEnd) {
  RunEvents events;
  EXPECT_TRUE(events.summary().empty());
  events.add(a_loss());
  EXPECT_EQ(events.summary(),
            (std::vector<std::string>{"1 event while training:", "  " + describe(a_loss())}));
  for (int i = 0; i < 4; ++i) events.add(a_loss());
  EXPECT_EQ(events.summary(5)[0], "5 events while training:");
  EXPECT_EQ(events.summary(3)[0], "5 events while training, the last 3 of them:");
  EXPECT_EQ(events.summary(3).size(), 4U);
}

TEST(LogStyle, Names) {
  for (const LogStyle style : {LogStyle::kBar, LogStyle::kPlain, LogStyle::kJson}) {
    EXPECT_EQ(parse_log_style(to_string(style)), style);
  }
  EXPECT_EQ(parse_log_style("loud"), std::nullopt);
}

}  // namespace
}  // namespace lockstep::report_test
