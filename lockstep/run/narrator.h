#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/report/metrics_queue.h"
#include "lockstep/report/run_events.h"
#include "lockstep/report/tensorboard.h"
#include "lockstep/report/training_log.h"
#include "lockstep/run/output_hold.h"
#include "lockstep/run/plan.h"

namespace lockstep {

// What people and files are told of a run, by its rank 0.

// Before the first step.
void announce(const TrainOptions& options, const TrainPlan& plan, Trainer& trainer, int threads);
// What will be left, told before the time is spent.
void announce_folder(const TrainOptions& options, const Trainer& trainer);
struct HowEnded {
  RunEnd end = RunEnd::kDone;
  int stopped = 0;            // by this signal
  bool nothing_left = false;  // the run was resumed after its last step
  double seconds = 0;
};
// How the run ended, what it leaves, and what to do with it.
void tell_end(const TrainOptions& options, const TrainPlan& plan, const Trainer& trainer,
              const HowEnded& how);

// "1 step", "2 steps"
std::string counted(std::int64_t count, const char* what);
SaveEvery save_every(const TrainOptions& options);
// What the model writes now, on one line.
std::string sample_text(Trainer& trainer, const Tokenizer& tokenizer, ThreadPool& pool);

// What the run is, for those who look at it: its settings, and the machine of this process.
RunStart run_start(const TrainOptions& options, const TrainPlan& plan, Trainer& trainer,
                   const RunState& state, int threads);

// Tells of steps and events while the run goes on: on the terminal, and in metrics.jsonl (and in
// files for TensorBoard) where the run has a folder. Lines wait while another process still holds
// the folder. One thread.
class Narrator {
 public:
  // Told every line of metrics as soon as there is one, whoever holds the folder.
  using Listener = std::function<void(const std::string& line)>;

  // `takes_over`: the run is under way, and another process has told of it so far.
  Narrator(const TrainOptions& options, const TrainPlan& plan, std::int64_t steps_done,
           bool takes_over, OutputHold& hold, Listener listener);

  void start(const RunStart& start);
  void step(const StepReport& report);
  void event(const RunEvent& event);
  // A checkpoint is on disk.
  void saved(const std::string& path);
  void halted(std::int64_t step, const std::string& why);
  // Lines of metrics that are not written yet, the newest ones.
  std::string waiting_lines() const;
  // Those of the process that told of the run before: they come before this one's own.
  void take_lines(const std::string& lines);
  // After the last step: what it all came to. Lines that still wait are written if the folder is
  // held; those of a process that the others have lost never are.
  void result(const RunFinish& end);

 private:
  using ForBoard = std::function<void(TensorBoardFile& board)>;
  void tell_lanes(const StepReport& report);
  // Without a step: an event. `for_board` may be null.
  void add(std::optional<std::int64_t> step, std::string text, ForBoard for_board);
  // `tag` and `words` are for TensorBoard.
  void add_event(std::string text, std::string tag, std::int64_t step, std::string words);
  void write_event(std::string text, std::string tag, std::int64_t step, std::string words);
  void write_to_board(const ForBoard& write);

  const DataSource& data_;
  const std::string out_;
  const bool tensorboard_;
  const Listener listener_;
  const std::int64_t steps_done_;
  OutputHold& hold_;
  std::optional<TrainingLog> log_;
  std::vector<std::uint32_t> told_lanes_;  // by rank, as people were told last
  std::optional<std::chrono::steady_clock::time_point> told_at_;
  std::optional<MetricsQueue> metrics_;  // where the run has a folder
  std::optional<TensorBoardFile> board_;
  bool board_fails_ = false;
  std::optional<StepReport> validated_;  // the last step with a validation
};

}  // namespace lockstep
