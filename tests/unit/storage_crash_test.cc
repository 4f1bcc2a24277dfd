// Every crash point of a run: of its lease, run.json, saves, rotations, resumes, lines of metrics,
// events for TensorBoard, halt.json, flight files, and of its model with its tokenizer. The file
// system is one in memory that loses what was not synced.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/transport/local_group.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/json.h"
#include "lockstep/files/lease.h"
#include "lockstep/flight/flight_file.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/report/metrics.h"
#include "lockstep/report/metrics_queue.h"
#include "lockstep/report/tensorboard.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/resume.h"
#include "lockstep/train/run_checkpoints.h"
#include "tests/support/build_kind.h"
#include "tests/support/faulty_storage.h"
#include "tests/support/trainers.h"

namespace lockstep::storage_crash_test {
namespace {

using test::FaultyStorage;
using Call = FaultyStorage::Call;
using Names = FaultyStorage::Names;
using Bytes = FaultyStorage::Bytes;
using ::testing::ElementsAre;

constexpr const char* kOut = "/runs/out";
constexpr const char* kMetrics = "/runs/out/metrics.jsonl";
constexpr std::int64_t kSteps = 4;
constexpr std::int64_t kSaveEvery = 2;
constexpr std::int64_t kHaltedStep = 3;
constexpr std::int64_t kKeepLast = 1;
constexpr const char* kRemembered = R"({"options":["--steps","4"]})";
constexpr const char* kHalt = R"({"step":3,"lane":1})";

// Whatever the machine makes of what was not synced.
struct Crash {
  Names names;
  Bytes bytes;
};
constexpr Crash kCrashes[] = {
    {Names::kLost, Bytes::kLost}, {Names::kLost, Bytes::kKept}, {Names::kHalf, Bytes::kHalf},
    {Names::kKept, Bytes::kLost}, {Names::kKept, Bytes::kHalf}, {Names::kKept, Bytes::kZeros},
    {Names::kKept, Bytes::kKept},  // as after kill -9
};

TrainingState first_state() {
  TrainingState state;
  state.run.settings.model = {.vocab = 264,
                              .hidden = 16,
                              .layers = 1,
                              .heads = 1,
                              .kv_heads = 1,
                              .intermediate = 16,
                              .context = 4};
  state.run.settings.global_batch = 1;
  state.run.settings.micro_batch = 1;
  state.run.settings.schedule.steps = kSteps;
  const std::size_t size = ParameterLayout(state.run.settings.model).size();
  for (FloatBuffer* buffer : {&state.parameters, &state.first_moment, &state.second_moment}) {
    *buffer = FloatBuffer(size);
    float* const values = buffer->data();
    for (std::size_t i = 0; i < size; ++i) values[i] = static_cast<float>(i) / 3;
  }
  return state;
}

// A step of training, as far as a disk can tell: all that there is changes, as a function of
// itself.
void step(TrainingState& state) {
  ++state.run.step;
  float* const first = state.first_moment.data();
  float* const second = state.second_moment.data();
  float* const parameters = state.parameters.data();
  const std::size_t size = state.parameters.size();
  for (std::size_t i = 0; i < size; ++i) {
    first[i] = 0.9f * first[i] + parameters[i] / 7;
    second[i] = 0.99f * second[i] + first[i];
    parameters[i] -= 0.01f * second[i] + static_cast<float>(state.run.step);
  }
}

// A tokenizer with two files.
std::shared_ptr<const Tokenizer> small_tokenizer() {
  static const auto made = [] {
    const std::string_view text = "aa ab aa";
    return std::shared_ptr<const Tokenizer>(
        bpe_tokenizer(train_bpe(std::span(&text, 1), 258), "{}", "small"));
  }();
  return made;
}

// The lease of a run, on a clock that goes on when it is asked to.
class Hold {
 public:
  explicit Hold(FaultyStorage& storage)
      : storage_(storage),
        now_(LeaseRule::Time() + std::chrono::hours(++runs_)),
        member_(fmt::format("m{}", runs_)) {}

  void take() {
    lease_.emplace(Lease::Options{.folder = kOut,
                                  .job = "run",
                                  .generation = "1",
                                  .member = member_,
                                  .term = kTerm,
                                  .clock = [this] { return now_; },
                                  .thread = false,
                                  .storage = &storage_});
    for (int look = 0; look < 50; ++look) {
      if (lease_->held()) return;
      pass();
    }
    throw Error(ErrorCode::kTimeout, "the lease cannot be had");
  }
  void pass() { now_ += kTerm / 10; }
  // May be had before take().
  WriteGuard guard() {
    return {[this](const std::string& path) { lease_->require("writing " + path); }, member_};
  }

 private:
  static constexpr std::chrono::seconds kTerm{10};
  static inline int runs_ = 0;

  FaultyStorage& storage_;
  LeaseRule::Time now_;
  const std::string member_;
  std::optional<Lease> lease_;
};

std::string hash_of(const TrainingState& state) {
  return weights_hash(ParameterLayout(state.run.settings.model), state.parameters.span());
}

// The hash of the weights after so many steps.
const std::string& hash_after(std::int64_t steps) {
  static std::map<std::int64_t, std::string> hashes;
  std::string& hash = hashes[steps];
  if (hash.empty()) {
    TrainingState state = first_state();
    while (state.run.step < steps) step(state);
    hash = hash_of(state);
  }
  return hash;
}

// What the run has been told is on disk: the last step.
struct Told {
  std::int64_t saved = 0;
};

// What a run that stumbles leaves for people. That it cannot be written does not end the run.
void tell_halt(const WriteGuard& guard, FaultyStorage& storage) {
  try {
    write_file(fmt::format("{}/{}", kOut, kHaltFile), kHalt, guard, storage);
    FlightFile flight;
    flight.rank = 0;
    flight.world_size = 1;
    write_flight_file(fmt::format("{}/{}", kOut, kFlightFolderOfRun), flight, storage);
  } catch (const Error&) {
  }
}

// A run in kOut, from wherever it stands to its end: returns the hash of its weights. A save that
// fails does not end it, and lines of metrics wait; what else fails does.
std::string run(FaultyStorage& storage, Told& told) {
  Communicator communicator(std::make_unique<PlanEngine>(std::move(make_local_group(1)[0])),
                            std::chrono::seconds(20));
  Hold hold(storage);
  const WriteGuard guard = hold.guard();
  ResumePoint resume = find_resume_point(
      communicator, kOut, FolderUse::kResume, [&] { hold.take(); }, guard, storage);
  TrainingState state = resume.state ? std::move(*resume.state) : first_state();
  state.tokenizer = small_tokenizer();
  write_file(fmt::format("{}/{}", kOut, kRunFile), kRemembered, guard, storage);
  MetricsQueue metrics({.path = kMetrics,
                        .steps_done = state.run.step,
                        .guard = guard,
                        .between_openings = std::chrono::nanoseconds(0),
                        .storage = &storage});
  metrics.add({.text = fmt::format(R"({{"event":"started","step":{}}})", state.run.step + 1)});
  metrics.write();
  std::optional<TensorBoardFile> board;
  const auto write_event = [&] {
    StepReport report;
    report.step = state.run.step;
    try {
      if (!board) board.emplace(kOut, state.run.step - 1, guard, storage);
      board->add(report);
    } catch (const Error&) {  // it is not there, and the run goes on
    }
  };
  while (state.run.step < kSteps) {
    for (int i = 0; i < 3; ++i) hold.pass();  // so that the lease is renewed
    step(state);
    write_event();
    if (state.run.step == kHaltedStep) tell_halt(guard, storage);
    metrics.add({state.run.step, fmt::format(R"({{"step":{},"loss":1.5}})", state.run.step)});
    metrics.write();
    if (state.run.step % kSaveEvery != 0 && state.run.step != kSteps) continue;
    try {
      save_checkpoint(kOut, state, guard, storage);
      told.saved = state.run.step;
      delete_old_checkpoints(kOut, state.run.step, kKeepLast, resume.damaged, guard, storage);
    } catch (const Error&) {
    }
  }
  metrics.write();
  const ParameterLayout layout(state.run.settings.model);
  save_model(kOut, layout, state.parameters.span(), state.tokenizer.get(), state.run.step, guard,
             storage);
  return hash_of(state);
}

std::optional<std::string> run_if_it_can(FaultyStorage& storage, Told& told) {
  try {
    return run(storage, told);
  } catch (const Error&) {
    return std::nullopt;
  }
}

// The steps that have lines in metrics.jsonl; a line that is none is a failure.
std::vector<std::int64_t> lines_of(const FaultyStorage& storage) {
  std::vector<std::int64_t> steps;
  std::string text = storage.contents(kMetrics).value_or("");
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    EXPECT_NE(end, std::string::npos) << "an incomplete line: " << text;
    if (end == std::string::npos) break;
    const Json line = parse_json(text.substr(0, end));
    EXPECT_TRUE(line.is_object()) << text.substr(0, end);
    if (line.is_object() && !line.contains("event")) {
      steps.push_back(line["step"].get<std::int64_t>());
    }
    text.erase(0, end + 1);
  }
  return steps;
}

void flight_files_are_whole(const FaultyStorage& storage) {
  const std::string flight = fmt::format("{}/{}", kOut, kFlightFolderOfRun);
  for (const std::string& generation : storage.names_in(flight)) {
    const std::string folder = flight + "/" + generation;
    for (const std::string& name : storage.names_in(folder)) {
      if (!name.ends_with(".json")) continue;  // one that was being written
      std::string problem;
      EXPECT_TRUE(parse_flight_file(storage.contents(folder + "/" + name).value(), problem))
          << name << ": " << problem;
    }
  }
}

class CrashedRun : public ::testing::Test {
 protected:
  void SetUp() override {
    testing::internal::CaptureStderr();  // thousands of warnings
    FaultyStorage storage;
    Told told;
    hash_ = run(storage, told);
    calls_ = storage.calls();
    names_ = storage.names_in(kOut);
    ASSERT_EQ(told.saved, kSteps);
  }
  void TearDown() override { testing::internal::GetCapturedStderr(); }

  // After a crash: what was told to be saved is there, and the run ends as it always does.
  void ends_as_ever(FaultyStorage& storage, const Told& told, bool all_metrics) {
    if (const auto newest = load_newest_checkpoint(kOut, storage)) {
      EXPECT_GE(newest->state.run.step, told.saved);
      EXPECT_EQ(hash_of(newest->state), hash_after(newest->state.run.step));
      // --resume needs no other option.
      EXPECT_EQ(storage.contents(fmt::format("{}/{}", kOut, kRunFile)), kRemembered);
    } else {
      EXPECT_EQ(told.saved, 0);
    }
    // Whole or not at all.
    const auto is_whole = [&](const char* name, const char* text) {
      const auto there = storage.contents(fmt::format("{}/{}", kOut, name));
      EXPECT_TRUE(!there || *there == text) << name << ": " << there.value_or("");
    };
    is_whole(kRunFile, kRemembered);
    is_whole(kHaltFile, kHalt);
    flight_files_are_whole(storage);
    Told again;
    const auto hash = run_if_it_can(storage, again);
    ASSERT_TRUE(hash);
    EXPECT_EQ(*hash, hash_);
    const auto last = load_newest_checkpoint(kOut, storage);
    EXPECT_EQ(last->state.run.step, kSteps);
    EXPECT_EQ(hash_of(last->state), hash_);
    const SavedModel model = load_model(kOut, storage);
    EXPECT_EQ(model.weights, hash_);
    ASSERT_TRUE(model.tokenizer);
    EXPECT_EQ(model.tokenizer->files()[0].bytes, small_tokenizer()->files()[0].bytes);
    is_whole(kRunFile, kRemembered);
    const std::vector<std::int64_t> lines = lines_of(storage);
    EXPECT_TRUE(std::ranges::is_sorted(lines));
    EXPECT_EQ(std::set(lines.begin(), lines.end()).size(), lines.size()) << "a step has two lines";
    if (all_metrics) {
      EXPECT_THAT(lines, ElementsAre(1, 2, 3, 4));
    }
    // Nothing half done stays. An old checkpoint may: one whose deletion had not begun.
    for (const std::string& name : storage.names_in(kOut)) {
      if (kept_aside_ && name.find(".damaged") != std::string::npos) continue;
      EXPECT_TRUE(std::ranges::find(names_, name) != names_.end() || parse_checkpoint_name(name))
          << name;
    }
  }

  std::string hash_;
  std::uint64_t calls_ = 0;
  std::vector<std::string> names_;
  bool kept_aside_ = false;  // a checkpoint that could not be read may be
};

// Sanitizers look at some of the calls.
constexpr std::uint64_t kStride = test::kSanitizers.empty() ? 1 : 7;

TEST_F(CrashedRun, AtEveryCall) {
  EXPECT_GT(calls_, 100u);
  for (std::uint64_t call = 1; call <= calls_; call += kStride) {
    FaultyStorage crashed;
    crashed.crash_at(call);
    Told told;
    run_if_it_can(crashed, told);
    ASSERT_TRUE(crashed.crashed());
    for (const Crash& crash : kCrashes) {
      SCOPED_TRACE(fmt::format("call {} of {}, names {}, bytes {}", call, calls_,
                               static_cast<int>(crash.names), static_cast<int>(crash.bytes)));
      FaultyStorage storage(crashed);
      storage.restart(crash.names, crash.bytes);
      ends_as_ever(storage, told, crash.bytes == Bytes::kKept && crash.names == Names::kKept);
      if (HasFailure()) return;
    }
  }
}

// The next run, which tidies up after the first, crashes as well.
TEST_F(CrashedRun, AtEveryCallOfTheRunThatResumes) {
  // In the second save, and in the rotation after it.
  for (const std::uint64_t first : {calls_ / 2, calls_ * 3 / 4}) {
    FaultyStorage before;
    before.crash_at(first);
    Told told;
    run_if_it_can(before, told);
    before.restart(Names::kKept, Bytes::kHalf);
    FaultyStorage measured(before);
    Told ignored;
    ASSERT_TRUE(run_if_it_can(measured, ignored));
    for (std::uint64_t call = 1; call <= measured.calls(); call += kStride) {
      FaultyStorage crashed(before);
      crashed.crash_at(call);
      Told then = told;
      run_if_it_can(crashed, then);
      ASSERT_TRUE(crashed.crashed());
      for (const Crash& crash : {kCrashes[0], kCrashes[2], kCrashes[6]}) {
        SCOPED_TRACE(fmt::format("calls {} and {}, names {}, bytes {}", first, call,
                                 static_cast<int>(crash.names), static_cast<int>(crash.bytes)));
        FaultyStorage storage(crashed);
        storage.restart(crash.names, crash.bytes);
        ends_as_ever(storage, then, false);
        if (HasFailure()) return;
      }
    }
  }
}

// One call fails, and the machine goes on.
TEST_F(CrashedRun, OneCallThatFails) {
  for (std::uint64_t call = 1; call <= calls_; call += kStride) {
    for (const int error : {EIO, ENOSPC, EDQUOT}) {
      SCOPED_TRACE(fmt::format("call {} of {} fails with {}", call, calls_, error));
      FaultyStorage storage;
      bool failed = false;
      storage.fault = [&](Call what, const std::string&) {
        if (what == Call::kRead || failed || storage.calls() + 1 != call) return 0;
        failed = true;
        return error;
      };
      Told told;
      const auto hash = run_if_it_can(storage, told);
      ASSERT_TRUE(failed);
      if (hash) {
        EXPECT_EQ(*hash, hash_);
      }
      ends_as_ever(storage, told, true);
      if (HasFailure()) return;
    }
  }
}

// The run that resumes cannot read something, once.
TEST_F(CrashedRun, OneReadThatFails) {
  FaultyStorage before;
  before.crash_at(calls_ * 3 / 4);
  Told told;
  run_if_it_can(before, told);
  before.restart(Names::kKept, Bytes::kHalf);
  ASSERT_GT(told.saved, 0);
  kept_aside_ = true;
  const auto run_with = [&](std::uint64_t bad, FaultyStorage& storage, Told& then) {
    std::uint64_t reads = 0;
    storage.fault = [&](Call what, const std::string&) {
      return what == Call::kRead && ++reads == bad ? EIO : 0;
    };
    run_if_it_can(storage, then);
    storage.fault = {};
    return reads;
  };
  FaultyStorage measured(before);
  Told ignored;
  const std::uint64_t reads = run_with(0, measured, ignored);
  EXPECT_GT(reads, 10u);
  for (std::uint64_t bad = 1; bad <= reads; bad += kStride) {
    SCOPED_TRACE(fmt::format("read {} of {}", bad, reads));
    FaultyStorage storage(before);
    Told then = told;
    EXPECT_GE(run_with(bad, storage, then), bad);
    ends_as_ever(storage, then, false);
    if (HasFailure()) return;
  }
}

TEST_F(CrashedRun, ShortReadsAndWritesAreCompleted) {
  FaultyStorage whole;
  FaultyStorage parts;
  parts.most_at_once = 7;
  Told told;
  EXPECT_EQ(run(whole, told), hash_);
  EXPECT_EQ(run(parts, told), hash_);
  EXPECT_EQ(whole.names_in(kOut), parts.names_in(kOut));
  for (const std::string& name : {std::string("metrics.jsonl"), std::string("model.safetensors"),
                                  std::string("checkpoint-4/optimizer.safetensors")}) {
    EXPECT_EQ(whole.contents(fmt::format("{}/{}", kOut, name)),
              parts.contents(fmt::format("{}/{}", kOut, name)))
        << name;
  }
}

// A trainer and its checkpoints as a run has them: those of the best validation among them, and the
// thread that writes. Returns the hash of its weights; `saved` is the last step that was told.
std::optional<std::string> train(FaultyStorage& storage, std::atomic<std::int64_t>& saved) {
  TrainerOptions options = test::small_training();
  options.global_batch = 4;
  options.micro_batch = 2;
  options.schedule.steps = 5;
  options.eval_every = 1;
  test::SoloTrainer worker(options, test::some_samples(40), test::some_samples(5), 1);
  try {
    Hold hold(storage);
    const WriteGuard guard = hold.guard();
    ResumePoint resume = find_resume_point(
        worker.communicator, kOut, FolderUse::kResume, [&] { hold.take(); }, guard, storage);
    if (resume.run) restore(worker.trainer, resume);
    worker.trainer.start();
    write_file(fmt::format("{}/{}", kOut, kRunFile), kRemembered, guard, storage);
    RunCheckpoints checkpoints(
        worker.trainer,
        {.out = kOut,
         .save_every = 2,
         .keep_last = 1,
         .wait = true,
         .last_step = options.schedule.steps,
         .damaged = resume.damaged,
         .saved = [&](const std::string&) { saved = worker.trainer.steps_done(); },
         .guard = guard,
         .storage = &storage,
         .retry = std::chrono::nanoseconds(0)},
        nullptr);
    worker.trainer.run(
        [&] {
          return Requests{0, checkpoints.save_wanted()};
        },
        [&](const StepReport& report) {
          checkpoints.after_step({.requested = report.save, .best = report.best});
          checkpoints.wait();
        });
    checkpoints.finish(false);
    return worker.trainer.verify();
  } catch (const Error&) {
    return std::nullopt;
  }
}

TEST(TrainedRun, EndsWithTheSameWeightsAfterACrashAtAnyCall) {
  testing::internal::CaptureStderr();
  FaultyStorage whole;
  std::atomic<std::int64_t> saved = 0;
  const auto hash = train(whole, saved);
  ASSERT_TRUE(hash);
  EXPECT_EQ(saved, 5);
  EXPECT_GT(whole.calls(), 100u);
  for (std::uint64_t call = 1; call <= whole.calls(); call += 3 * kStride) {
    FaultyStorage crashed;
    crashed.crash_at(call);
    std::atomic<std::int64_t> told = 0;
    train(crashed, told);
    ASSERT_TRUE(crashed.crashed());
    for (const Crash& crash : {kCrashes[0], kCrashes[2], kCrashes[6]}) {
      SCOPED_TRACE(fmt::format("call {} of {}, names {}, bytes {}", call, whole.calls(),
                               static_cast<int>(crash.names), static_cast<int>(crash.bytes)));
      FaultyStorage storage(crashed);
      storage.restart(crash.names, crash.bytes);
      const auto newest = load_newest_checkpoint(kOut, storage);
      EXPECT_GE(newest ? newest->state.run.step : 0, told);
      std::atomic<std::int64_t> again = 0;
      EXPECT_EQ(train(storage, again), hash);
      const auto last = load_newest_checkpoint(kOut, storage);
      ASSERT_TRUE(last);
      EXPECT_EQ(last->state.run.step, 5);
      EXPECT_EQ(hash_of(last->state), hash);
      if (HasFailure()) break;
    }
    if (HasFailure()) break;
  }
  testing::internal::GetCapturedStderr();
}

TEST(StorageFolders, ThoseAboveAreSynced) {
  FaultyStorage storage;
  make_folder("/a/b/c", storage);
  storage.restart(Names::kLost, Bytes::kLost);
  EXPECT_TRUE(storage.find_folder("/a/b/c"));
  EXPECT_EQ(storage.find_folder("/a/d"), nullptr);
}

// The first sync that fails makes the save write all again; after the second one it is not told.
TEST(StorageFolders, ASaveIsToldWhenItsNameIsSynced) {
  FaultyStorage storage;
  make_folder(kOut, storage);
  int failures = 0;
  storage.fault = [&](Call call, const std::string& path) {
    return call == Call::kSync && path == kOut && failures-- > 0 ? EIO : 0;
  };
  TrainingState state = first_state();
  const auto is_there_after_a_crash = [&] {
    FaultyStorage crashed(storage);
    crashed.restart(Names::kLost, Bytes::kLost);
    return crashed.find_folder(checkpoint_path(kOut, state.run.step)) != nullptr;
  };
  step(state);
  failures = 1;
  save_checkpoint(kOut, state, {}, storage);
  EXPECT_TRUE(is_there_after_a_crash());
  step(state);
  failures = 2;
  EXPECT_THROW(save_checkpoint(kOut, state, {}, storage), Error);
  EXPECT_FALSE(is_there_after_a_crash());
  failures = 0;
  save_checkpoint(kOut, state, {}, storage);  // finds what the one before has left
  EXPECT_TRUE(is_there_after_a_crash());
}

// The records in a file for TensorBoard; bytes that are none are a failure.
std::size_t records_in(std::string_view bytes) {
  std::size_t records = 0;
  while (!bytes.empty()) {
    std::uint64_t size = 0;
    constexpr std::size_t kAround = 8 + 4 + 4;  // length and two checksums
    EXPECT_GE(bytes.size(), kAround);
    if (bytes.size() < kAround) break;
    std::memcpy(&size, bytes.data(), sizeof size);
    EXPECT_LE(size, bytes.size() - kAround);
    if (size > bytes.size() - kAround) break;
    EXPECT_EQ(bytes.substr(0, size + kAround), tfevents_record(bytes.substr(12, size)));
    bytes.remove_prefix(size + kAround);
    ++records;
  }
  return records;
}

// A torn record would hide all that come after it from TensorBoard.
TEST(TensorBoard, AnEventThatDoesNotFitIsNotThere) {
  FaultyStorage storage;
  make_folder(kOut, storage);
  const std::string folder = fmt::format("{}/{}", kOut, kTensorBoardFolder);
  storage.capacity = 20;
  EXPECT_THROW(TensorBoardFile(kOut, 0, {}, storage), Error);
  EXPECT_THAT(storage.names_in(folder), ElementsAre());
  storage.capacity = UINT64_MAX;
  TensorBoardFile board(kOut, 0, {}, storage);
  const auto bytes = [&] {
    return storage.contents(folder + "/" + storage.names_in(folder).at(0)).value();
  };
  StepReport report;
  report.step = 1;
  board.add(report);
  EXPECT_EQ(records_in(bytes()), 3u);  // the version, the start, the step
  report.step = 2;
  storage.capacity = bytes().size() + 30;
  EXPECT_THROW(board.add(report), Error);
  EXPECT_EQ(records_in(bytes()), 3u);
  storage.capacity = UINT64_MAX;
  board.add(report);
  EXPECT_EQ(records_in(bytes()), 4u);
}

// --overwrite begins with an empty folder, whatever the run before has left.
TEST(StorageFolders, AnEarlierRunGoesWithItsFlightFiles) {
  FaultyStorage storage;
  make_folder(kOut, storage);
  TensorBoardFile(kOut, 0, {}, storage);
  tell_halt({}, storage);
  ASSERT_FALSE(storage.names_in(fmt::format("{}/{}", kOut, kFlightFolderOfRun)).empty());
  Communicator communicator(std::make_unique<PlanEngine>(std::move(make_local_group(1)[0])),
                            std::chrono::seconds(20));
  find_resume_point(communicator, kOut, FolderUse::kOverwrite, {}, {}, storage);
  EXPECT_THAT(storage.names_in(kOut), ElementsAre());
}

// Who has lost the lease meanwhile changes nothing more.
TEST(StorageFolders, CleaningAsksForTheLeaseEachTime) {
  Communicator communicator(std::make_unique<PlanEngine>(std::move(make_local_group(1)[0])),
                            std::chrono::seconds(20));
  FaultyStorage before;
  make_folder(kOut, before);
  TrainingState state = first_state();
  for (int i = 0; i < 2; ++i) {
    step(state);
    save_checkpoint(kOut, state, {}, before);
  }
  TensorBoardFile(kOut, 0, {}, before);
  tell_halt({}, before);
  make_folder(fmt::format("{}/checkpoint-3.else.tmp", kOut), before);
  before.set_contents(fmt::format("{}/metrics.jsonl.else.tmp", kOut), "half");
  // Whether a run that may do so much stops there.
  const auto clean = [&](FolderUse use, int allowed) {
    FaultyStorage storage(before);
    std::optional<std::uint64_t> calls;  // when the lease was lost
    std::set<std::string> asked;
    storage.fault = [&](Call call, const std::string& path) {
      const bool changes = call == Call::kRename || call == Call::kRemove;
      if (changes && path.rfind('/') == std::strlen(kOut)) {
        EXPECT_TRUE(asked.contains(path)) << path;
      }
      return 0;
    };
    const WriteGuard guard{[&](const std::string& path) {
      asked.insert(path);
      if (allowed-- > 0) return;
      calls = storage.calls();
      throw Error(ErrorCode::kIo, "lost");
    }};
    bool lost = false;
    try {
      find_resume_point(communicator, kOut, use, {}, guard, storage);
    } catch (const Error&) {
      lost = true;
      EXPECT_EQ(storage.calls(), calls);
    }
    return lost;
  };
  for (const FolderUse use : {FolderUse::kResume, FolderUse::kOverwrite}) {
    int allowed = 0;
    while (clean(use, allowed)) ++allowed;
    EXPECT_EQ(allowed > 5, use == FolderUse::kOverwrite);
    EXPECT_GE(allowed, 2);
  }
}

TEST(Metrics, ALineThatDoesNotFitIsNotThere) {
  FaultyStorage storage;
  make_folder(kOut, storage);
  MetricsFile file(kMetrics, 0, {}, storage);
  file.write_step(1, R"({"step":1})");
  storage.capacity = 15;
  EXPECT_THROW(file.write_step(2, R"({"step":2})"), Error);
  EXPECT_THAT(lines_of(storage), ElementsAre(1));
  storage.capacity = UINT64_MAX;
  file.write_step(2, R"({"step":2})");
  EXPECT_THAT(lines_of(storage), ElementsAre(1, 2));
}

class FullDisk : public ::testing::Test {
 protected:
  FullDisk() { make_folder(kOut, storage_); }

  // The step's line, and how many bytes were read for it.
  std::uint64_t add(MetricsQueue& metrics, std::int64_t step) {
    const std::uint64_t before = storage_.bytes_read();
    metrics.add({step, fmt::format(R"({{"step":{}}})", step)});
    metrics.write();
    return storage_.bytes_read() - before;
  }

  FaultyStorage storage_;
};

TEST_F(FullDisk, LinesOfMetricsWaitAndNothingIsReadForThem) {
  MetricsQueue metrics({.path = kMetrics, .storage = &storage_});
  add(metrics, 1);
  storage_.capacity = 15;
  testing::internal::CaptureStderr();
  for (std::int64_t step = 2; step <= 9; ++step) EXPECT_EQ(add(metrics, step), 0u);
  EXPECT_THAT(lines_of(storage_), ElementsAre(1));
  EXPECT_THROW(metrics.write_last(), Error);
  storage_.capacity = UINT64_MAX;
  add(metrics, 10);
  EXPECT_THAT(lines_of(storage_), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9, 10));
  metrics.write_last();
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, testing::ContainsRegex("metrics.jsonl cannot be written now.*No space left"));
  EXPECT_EQ(said.find("cannot be written now"), said.rfind("cannot be written now")) << said;
  EXPECT_THAT(said, testing::ContainsRegex("metrics.jsonl is written again"));
}

// A line that stays by half has the file opened again, which reads all of it: not at every step.
TEST_F(FullDisk, AFileThatMustBeOpenedAgainIsReadOnceInAWhile) {
  testing::internal::CaptureStderr();
  for (const bool patient : {true, false}) {
    storage_.set_contents(kMetrics, "");
    MetricsQueue metrics({.path = kMetrics,
                          .between_openings = std::chrono::hours(patient ? 1 : 0),
                          .storage = &storage_});
    add(metrics, 1);
    storage_.capacity = 15;
    storage_.fault = [](Call call, const std::string&) {
      return call == Call::kTruncate ? EIO : 0;
    };
    for (std::int64_t step = 2; step <= 9; ++step)
      EXPECT_EQ(add(metrics, step) > 0, !patient && step > 2);
    storage_.fault = {};
    storage_.capacity = UINT64_MAX;
    if (!patient) add(metrics, 10);
    metrics.write_last();
    EXPECT_THAT(lines_of(storage_).size(), patient ? 9u : 10u);
  }
  testing::internal::GetCapturedStderr();
}

// A disk that is full while training goes on, and then has room again.
TEST_F(FullDisk, TheRunGoesOnAndSavesWhenThereIsRoom) {
  TrainerOptions options = test::small_training();
  options.global_batch = 4;
  options.micro_batch = 2;
  options.schedule.steps = 12;
  const auto train = [&](FaultyStorage& storage, std::uint64_t room,
                         const std::function<void(std::int64_t, RunCheckpoints&)>& look) {
    test::SoloTrainer worker(options, test::some_samples(40), test::some_samples(5), 1);
    make_folder(kOut, storage);
    worker.trainer.start();
    RunCheckpoints checkpoints(worker.trainer,
                               {.out = kOut,
                                .save_every = 3,
                                .keep_last = 1,
                                .wait = true,
                                .last_step = 12,
                                .storage = &storage,
                                .retry = std::chrono::nanoseconds(0)},
                               nullptr);
    worker.trainer.run(
        [&] {
          return Requests{0, checkpoints.save_wanted()};
        },
        [&](const StepReport& report) {
          const std::int64_t done = report.step;
          if (done == 4) storage.capacity = room;
          if (done == 8) storage.capacity = UINT64_MAX;
          checkpoints.after_step({.requested = report.save});
          checkpoints.wait();
          look(done, checkpoints);
        });
    checkpoints.finish(false);
    return worker.trainer.verify();
  };
  FaultyStorage roomy;
  std::uint64_t used = 0;
  const std::string hash = train(roomy, UINT64_MAX, [&](std::int64_t step, RunCheckpoints&) {
    if (step != 3) return;
    for (const char* name : {"config.json", "manifest.json", "trainer_state.json",
                             "model.safetensors", "optimizer.safetensors"}) {
      used += roomy.contents(fmt::format("{}/checkpoint-3/{}", kOut, name))->size();
    }
  });
  ASSERT_GT(used, 0u);
  EXPECT_THAT(list_checkpoints(kOut, roomy), ElementsAre(12));
  FaultyStorage full;
  std::map<std::int64_t, std::vector<std::int64_t>> steps;
  testing::internal::CaptureStderr();
  EXPECT_EQ(train(full, used * 3 / 2,
                  [&](std::int64_t step, RunCheckpoints&) {
                    steps[step] = list_checkpoints(kOut, full);
                    // The last good one is always there, whole.
                    if (step >= 3) {
                      EXPECT_EQ(load_newest_checkpoint(kOut, full)->state.run.step,
                                steps[step].front());
                    }
                  }),
            hash);
  // The run tells it.
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              testing::ContainsRegex("warning: .*No space left on device"));
  EXPECT_THAT(steps[5], ElementsAre(3));
  EXPECT_THAT(steps[6], ElementsAre(3));  // that of step 6 did not fit, and 3 stays
  EXPECT_THAT(steps[7], ElementsAre(3));
  EXPECT_THAT(steps[8], ElementsAre(8));  // tried again at every step since, and now there is room
  EXPECT_THAT(list_checkpoints(kOut, full), ElementsAre(12));
}

// A disk that takes its time over a sync holds nobody up.
TEST(SlowDisk, TrainingGoesOnDuringASync) {
  FaultyStorage storage;
  make_folder(kOut, storage);
  std::atomic<bool> slow = true;
  storage.fault = [&](Call call, const std::string&) {
    if (call == Call::kSync) slow.wait(true);
    return 0;
  };
  test::SoloTrainer worker(test::small_training(), test::some_samples(40), test::some_samples(5),
                           1);
  RunCheckpoints checkpoints(
      worker.trainer, {.out = kOut, .save_every = 1, .last_step = 9, .storage = &storage}, nullptr);
  worker.trainer.start();
  worker.trainer.set_steps_done(1);
  checkpoints.after_step({});
  EXPECT_EQ(checkpoints.phase(), CheckpointPhase::kWriting);
  worker.trainer.step();
  checkpoints.after_step({});  // is skipped: the first is still being written
  EXPECT_EQ(checkpoints.phase(), CheckpointPhase::kWriting);
  slow = false;
  slow.notify_all();
  checkpoints.wait();
  EXPECT_THAT(list_checkpoints(kOut, storage), ElementsAre(1));
}

}  // namespace
}  // namespace lockstep::storage_crash_test
