#include "lockstep/report/run_record.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "lockstep/report/metrics.h"

namespace lockstep::run_record_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

StepReport report(std::int64_t step, int ranks = 2) {
  StepReport report;
  report.step = step;
  report.loss = static_cast<double>(step);
  report.gradient_norm = 2;
  report.learning_rate = 0.5;
  report.tokens = 100;
  report.seconds = 0.25;
  for (int rank = 0; rank < ranks; ++rank) {
    PhaseTimes times;
    times[Phase::kForward] = 0.1 * (rank + 1);
    times[Phase::kCommunication] = static_cast<double>(step);
    report.phases.push_back(times);
    report.lanes.push_back(static_cast<std::uint32_t>(3 + rank));
  }
  return report;
}

std::string line(std::int64_t step, int ranks = 2) { return metrics_line(report(step, ranks), 0); }

TEST(RunRecord, TakesTheLinesOfMetrics) {
  RunRecord record;
  EXPECT_EQ(record.state(), "unknown");
  record.add(R"({"event":"started","step":1,"steps":8,"members":["rank 0","rank 1"]})");
  StepReport second = report(2);
  second.validation_loss = 1.5;
  second.validation_accuracy = 0.25;
  second.straggler = Straggler{1, 0.5};
  record.add(line(1));
  record.add(metrics_line(second, 2));
  for (const char* noise :
       {"", "{", "[]", "3", R"({"step":"x"})", R"({"event":7})", R"({"a":1})"}) {
    record.add(noise);
  }
  EXPECT_EQ(record.state(), "running");
  EXPECT_EQ(record.step(), 2);
  EXPECT_EQ(record.steps(), 8);
  EXPECT_EQ(record.tokens(), 200);
  EXPECT_DOUBLE_EQ(*record.seconds_left(), 6 * 0.25);
  ASSERT_EQ(record.points().size(), 2U);
  EXPECT_EQ(record.points()[1].loss, 2);
  EXPECT_EQ(record.points()[1].tokens_per_second, 400);
  EXPECT_EQ(record.validation_loss(), 1.5);
  EXPECT_TRUE(record.validation_bits());
  EXPECT_EQ(record.validation_accuracy(), 0.25);
  EXPECT_EQ(record.straggler()->rank, 1);
  EXPECT_THAT(record.members(), ElementsAre("rank 0", "rank 1"));
  ASSERT_EQ(record.ranks().size(), 2U);
  EXPECT_DOUBLE_EQ(record.ranks()[1].mean[Phase::kForward], 0.2);
  EXPECT_DOUBLE_EQ(record.ranks()[0].mean[Phase::kCommunication], 1.5);
  EXPECT_EQ(record.ranks()[1].lanes, 4U);
  record.add(line(3, 1));  // a worker was lost: what two ranks did says nothing any more
  EXPECT_EQ(record.ranks().size(), 1U);
  EXPECT_DOUBLE_EQ(record.ranks()[0].mean[Phase::kCommunication], 3);
  EXPECT_FALSE(record.straggler());
}

std::string straggling_line(std::int64_t step) {
  StepReport slow = report(step);
  slow.straggler = Straggler{1, 0.5};
  return metrics_line(slow, 0);
}

TEST(RunRecord, AStragglerStaysUntilItIsLookedForAgain) {
  RunRecord record;
  record.add(R"({"event":"started","step":1,"members":["rank 0 of a","rank 1 of b"]
})");
  const auto run_to = [&](std::int64_t last) {
    for (std::int64_t step = record.step() + 1; step <= last; ++step) record.add(line(step));
  };
  run_to(9);
  EXPECT_FALSE(record.straggler());
  record.add(straggling_line(10));
  run_to(19);
  ASSERT_TRUE(record.straggler());
  EXPECT_EQ(record.straggler()->rank, 1);
  run_to(20);
  EXPECT_FALSE(record.straggler());
  // Ranks are others now.
  record.add(straggling_line(30));
  record.add(R"({"event":"saved","step":30})");
  EXPECT_TRUE(record.straggler());
  record.add(R"({"event":"joined","step":31,"members":["rank 0 of a","rank 1 of c"]
  })");
  EXPECT_FALSE(record.straggler());
}

TEST(RunRecord, ARunThatWentBackIsSeenToComputeStepsAgain) {
  RunRecord record;
  record.add(R"({"event":"started","step":1,"steps":9})");
  for (int step = 1; step <= 5; ++step) record.add(line(step));
  record.add(R"({"event":"went back","step":6,"back_to":2})");
  EXPECT_EQ(record.step(), 2);
  EXPECT_DOUBLE_EQ(*record.seconds_left(), 7 * 0.25);
  StepReport again = report(3, 1);
  again.loss = 30;
  again.seconds = 0.5;
  record.add(metrics_line(again, 0));
  EXPECT_EQ(record.step(), 3);
  EXPECT_EQ(record.ranks().size(), 1U);
  EXPECT_EQ(run_json(record)["tokens_per_s"], 200);
  // A point stays as it was, and counters do not fall.
  ASSERT_EQ(record.points().size(), 5U);
  EXPECT_EQ(record.points()[2].loss, 3);
  EXPECT_EQ(record.tokens(), 500);
  EXPECT_THAT(prometheus_text(record, "a"), HasSubstr("lockstep_steps_total{run=\"a\"} 5\n"));
  for (int step = 4; step <= 6; ++step) record.add(line(step));
  EXPECT_EQ(record.points().size(), 6U);
  EXPECT_EQ(record.tokens(), 600);
}

TEST(RunRecord, KnowsHowARunEnded) {
  const auto state_after = [](const char* event) {
    RunRecord record;
    record.add(R"({"event":"started","step":1})");
    record.add(event);
    return std::string(record.state());
  };
  EXPECT_EQ(state_after(R"({"event":"ended","step":5,"how":"done"})"), "done");
  EXPECT_EQ(state_after(R"({"event":"ended","step":5,"how":"stopped"})"), "stopped");
  EXPECT_EQ(state_after(R"({"event":"halted","step":5})"), "halted");
  EXPECT_EQ(state_after(R"({"event":"lost","step":5})"), "running");
}

TEST(RunRecord, AResumedRunForgetsWhatItDoesAgain) {
  RunRecord record;
  record.add(R"({"event":"started","step":1,"steps":9})");
  for (int step = 1; step <= 5; ++step) record.add(line(step));
  record.add(R"({"event":"lost","step":3})");
  record.add(R"({"event":"lost","step":5})");
  record.add(R"({"event":"started","step":4,"steps":9})");
  EXPECT_EQ(record.step(), 3);
  EXPECT_EQ(record.tokens(), 300);
  EXPECT_EQ(record.count("lost"), 1);
  record.add(line(4));
  EXPECT_EQ(record.points().back().step, 4);
  EXPECT_EQ(record.points().size(), 4U);
}

TEST(RunRecord, ALongRunKeepsAFewPointsThatAreMeans) {
  RunRecord record;
  constexpr std::int64_t kSteps = RunRecord::kMostPoints * 2 + 1;
  for (std::int64_t step = 1; step <= kSteps; ++step) {
    const std::string number = std::to_string(step);
    record.add(R"({"step":)" + number + R"(,"loss":)" + number + R"(,"tokens":100})");
  }
  EXPECT_EQ(record.stride(), 4);
  EXPECT_LE(record.points().size(), RunRecord::kMostPoints);
  EXPECT_EQ(record.points()[0].step, 4);
  EXPECT_DOUBLE_EQ(record.points()[0].loss, 2.5);  // of steps 1 to 4
  EXPECT_EQ(record.points().back().step, kSteps);
  EXPECT_DOUBLE_EQ(record.points().back().loss, static_cast<double>(kSteps));
  EXPECT_EQ(record.tokens(), kSteps * 100);
}

TEST(RunRecord, ManyEventsKeepTheFirstAndTheLast) {
  RunRecord record;
  for (int i = 0; i < 3000; ++i) {
    record.add(R"({"event":"saved","step":)" + std::to_string(i) + "}");
  }
  EXPECT_EQ(record.events().size(), RunRecord::kMostEvents);
  EXPECT_EQ(record.events().front()["step"], 0);
  EXPECT_EQ(record.events().back()["step"], 2999);
  EXPECT_EQ(record.count("saved"), 3000);
  EXPECT_THAT(prometheus_text(record, "a"), HasSubstr("kind=\"saved\"} 3000\n"));
}

TEST(RunRecord, AsJson) {
  RunRecord record;
  Json empty = run_json(record);
  EXPECT_EQ(empty["state"], "unknown");
  EXPECT_TRUE(empty["loss"].is_null());
  for (int step = 1; step <= 4; ++step) record.add(line(step));
  record.add(R"({"step":5,"loss":null,"val_loss":3.5})");
  const Json run = run_json(record);
  EXPECT_EQ(run["step"], 5);
  EXPECT_TRUE(run["loss"].is_null());
  EXPECT_EQ(run["ranks"].size(), 2U);
  EXPECT_EQ(run["ranks"][1]["lanes"], 4);
  EXPECT_EQ(run["ranks"][1]["phases"]["forward"], 0.2);
  const Json steps = steps_json(record, 2);
  EXPECT_EQ(steps["step"], Json({3, 4, 5}));
  EXPECT_EQ(steps["loss"], Json({3.0, 4.0, nullptr}));
  EXPECT_EQ(steps["val_loss"], Json::array({Json::array({5, 3.5})}));
}

TEST(RunRecord, ForPrometheus) {
  RunRecord record;
  EXPECT_THAT(prometheus_text(record, "a"), HasSubstr("lockstep_steps_total{run=\"a\"} 0\n"));
  record.add(R"({"event":"started","step":1,"steps":8})");
  record.add(line(1));
  record.add(R"({"event":"saved","step":1})");
  const std::string text = prometheus_text(record, "a \"b\"\\\n");
  EXPECT_THAT(text, HasSubstr("lockstep_loss_nats{run=\"a \\\"b\\\"\\\\ \"} 1\n"));
  EXPECT_THAT(text, HasSubstr("kind=\"saved\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("rank=\"1\",phase=\"forward\"} 0.2\n"));
  EXPECT_THAT(text, HasSubstr("# TYPE lockstep_phase_duration_seconds gauge\n"));
  // The phases add up to a step, so what is hidden is none of them.
  EXPECT_THAT(text, Not(HasSubstr("phase=\"hidden\"")));
  EXPECT_THAT(
      text,
      HasSubstr("lockstep_hidden_communication_seconds{run=\"a \\\"b\\\"\\\\ \",rank=\"1\"} 0\n"));
}

}  // namespace
}  // namespace lockstep::run_record_test
