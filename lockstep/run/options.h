#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/data/source.h"
#include "lockstep/lockstep.h"
#include "lockstep/model/config.h"
#include "lockstep/model/schedule.h"
#include "lockstep/report/training_log.h"
#include "lockstep/run/device.h"
#include "lockstep/train/reducer.h"
#include "lockstep/train/resume.h"

namespace lockstep {

// Between checkpoints: steps, or time, or neither.
struct SaveEvery {
  std::int64_t steps = 0;
  std::chrono::nanoseconds interval = {};
  bool operator==(const SaveEvery&) const = default;
};
// "500" or "5e2" (steps), "90s", "10m", "2h", "0" (none); nothing for other text.
std::optional<SaveEvery> parse_save_every(std::string_view text);
std::string to_string(const SaveEvery& every);
inline constexpr SaveEvery kDefaultSaveEvery = {0, std::chrono::minutes(10)};

// What the workers of a gradient server send it.
enum class StarProtocol : std::uint8_t {
  kLanes,           // sums over lanes: ours, with the same bits for any number of workers
  kOriginal,        // means, block by block, in the original protocol
  kOriginalVector,  // the same as one vector
};
std::string_view to_string(StarProtocol protocol);

// What a training run is to do. What is not given is chosen when the data is known.
struct TrainOptions {
  // Opens the data, for the model that training starts from if there is one. Every worker calls it
  // once, on a thread of its own, and must get the same.
  std::function<DataSource(const std::optional<ModelTokenizer>& start)> data;
  std::string out;
  std::string init;    // a model's folder; of no account where a checkpoint is resumed
  std::string preset;  // sizes of the model by name; see named_model()
  std::optional<std::int64_t> steps;
  std::uint64_t global_batch = 0;
  std::uint64_t micro_batch = 0;
  ModelConfig model;        // 0: chosen
  std::uint32_t vocab = 0;  // of the model, where the data's is smaller
  std::optional<double> learning_rate;
  std::optional<std::int64_t> warmup;
  Decay decay = Decay::kCosine;
  double weight_decay = 0.1;
  double clip = 1.0;
  std::uint64_t seed = 0;
  int threads = 0;
  Precision precision = Precision::kF32;
  std::string device = "cpu";
  bool recompute = false;
  std::optional<std::int64_t> eval_every;
  std::optional<LogStyle> log;
  std::int64_t early_stop = 0;
  std::int64_t sample_every = 0;
  std::optional<SaveEvery> save_every;
  std::int64_t keep_last = 3;
  bool save_wait = false;
  FolderUse folder = FolderUse::kNew;
  std::string page;             // where the live page is, [HOST:]PORT; empty: there is none
  bool page_elsewhere = false;  // the centre's process serves it, and rank 0 tells it: Job::tell()
  bool tensorboard = false;     // event files in `out`
  bool dry_run = false;         // three steps, to say what the run would take; nothing is written
  std::string remembered;       // the text of run.json, which is written to `out`

  // The workers.
  std::optional<int> workers;
  int local_rank = 0;  // of a worker that joins a job: its number among those of its launcher
  JoinOptions job;     // their places aside
  StarProtocol protocol = StarProtocol::kLanes;  // with kServer
  // A job that others may join: where it listens, HOST:PORT, and how many workers it begins with.
  std::string listen;
  std::optional<int> expect;
  // Where a job is to be joined, HOST:PORT. All that is not local to this process comes from it:
  // `adopt` turns the job's options, as `remembered` has them, into those of this process.
  std::string join;
  std::function<TrainOptions(const std::string& options)> adopt;
  bool fail_fast = false;  // the first loss ends the job
  int min_workers = 1;
  // How long fewer than min_workers wait for others, with their state saved, before the run ends.
  std::chrono::nanoseconds worker_patience = std::chrono::minutes(10);
  ReducerOptions reducer;
  ExchangeChoice exchange = ExchangeChoice::kAuto;
  bool balance = true;  // lanes follow speed (TrainerOptions::balance)
  std::int64_t verify_every = 100;
  std::string replay;
  std::vector<std::string> skip_lanes;  // STEP:LANE, or halt.json files
};

// What would fail on every worker alike, told once before any is started. Throws
// Error{kInvalidArgument} for options that do not go together.
void check_options(const TrainOptions& options);

}  // namespace lockstep
