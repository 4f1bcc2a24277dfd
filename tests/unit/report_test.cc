#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/report/metrics.h"
#include "lockstep/report/progress.h"
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
  const RunProgress progress{50, 200, 1.5, 1.75, 12'345, 90};
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

TEST(Metrics, OneObjectPerStep) {
  StepReport report;
  report.step = 3;
  report.epoch = 0.5;
  report.loss = 2.0;
  report.gradient_norm = 0.25;
  report.learning_rate = 1e-3;
  report.tokens = 64;
  report.seconds = 0.5;
  report.lanes = {5, 3};
  auto json = nlohmann::json::parse(metrics_line(report, 2.0));
  EXPECT_EQ(json["step"], 3);
  EXPECT_EQ(json["loss"], 2.0);
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
  file.write("{}");
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
  MetricsFile(path, 2).write("{\"step\":3,\"again\":true}");
  std::ifstream reader(path);
  const std::string text(std::istreambuf_iterator<char>(reader), {});
  EXPECT_EQ(text, "{\"step\":1}\n{\"step\":2}\n{\"step\":3,\"again\":true}\n");
}

TEST(LogStyle, Names) {
  for (const LogStyle style : {LogStyle::kBar, LogStyle::kPlain, LogStyle::kJson}) {
    EXPECT_EQ(parse_log_style(to_string(style)), style);
  }
  EXPECT_EQ(parse_log_style("loud"), std::nullopt);
}

}  // namespace
}  // namespace lockstep::report_test
