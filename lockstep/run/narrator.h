#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/report/metrics.h"
#include "lockstep/report/run_events.h"
#include "lockstep/report/training_log.h"
#include "lockstep/run/output_hold.h"
#include "lockstep/run/plan.h"

namespace lockstep {

// What people and files are told of a run, by its rank 0.

// Before the first step.
void announce(const TrainOptions& options, const TrainPlan& plan, Trainer& trainer, int threads);
// What will be left, told before the time is spent.
void announce_folder(const TrainOptions& options, const Trainer& trainer);
// How the run ended, what it leaves, and what to do with it.
void tell_end(const TrainOptions& options, const TrainPlan& plan, const Trainer& trainer,
              int stopped, double seconds);

// "1 step", "2 steps"
std::string counted(std::int64_t count, const char* what);
SaveEvery save_every(const TrainOptions& options);
// What the model writes now, on one line.
std::string sample_text(Trainer& trainer, const Tokenizer& tokenizer, ThreadPool& pool);

// Tells of steps and events while the run goes on: on the terminal, and in metrics.jsonl where the
// run has a folder. Lines wait while another process still holds the folder. One thread.
class Narrator {
 public:
  // `takes_over`: the run is under way, and another process has told of it so far.
  Narrator(const TrainOptions& options, const TrainPlan& plan, std::int64_t steps_done,
           bool takes_over, OutputHold& hold);

  void step(const StepReport& report);
  void event(const RunEvent& event);
  // After the last step: what it all came to. Lines that still wait are written if the folder is
  // held; those of a process that the others have lost never are.
  void result();

 private:
  struct Line {
    std::optional<std::int64_t> step;  // none: an event
    std::string text;
  };
  void tell_lanes(const StepReport& report);
  void write(Line line);
  void write_waiting();

  const DataSource& data_;
  const std::string out_;
  const std::int64_t steps_done_;
  const bool takes_over_;
  OutputHold& hold_;
  std::optional<TrainingLog> log_;
  std::vector<std::uint32_t> told_lanes_;  // by rank, as people were told last
  std::optional<std::chrono::steady_clock::time_point> told_at_;
  std::optional<MetricsFile> metrics_;  // once the folder is held
  std::deque<Line> waiting_;
  std::optional<double> validation_loss_;
};

}  // namespace lockstep
