#include "lockstep/train/levelling.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/engine.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/resume.h"
#include "lockstep/train/run_checkpoints.h"
#include "tests/support/pretended_gpu.h"
#include "tests/support/seeds.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/trainers.h"

namespace lockstep::levelling_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr std::int64_t kSteps = 4;

Samples short_samples(std::uint64_t count) {
  constexpr int kShort = 4;
  std::vector<std::int32_t> tokens(count * kShort + 1);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<std::int32_t>((i * (i / 16 % 5 + 1)) % 48);
  }
  return Samples({TokenShard::of("tokens", tokens, {})}, 64, kShort);
}

// Five norm blocks of parameters, six lanes of four tokens.
TrainerOptions tiny_training(bool shard) {
  TrainerOptions options = test::small_training();
  options.model.context = 4;
  options.global_batch = 6;
  options.micro_batch = 1;
  options.schedule.steps = kSteps;
  options.eval_every = 2;
  options.eval_samples = 3;
  options.verify_every = 2;
  options.clip = 0.05;
  options.reducer.bucket_bytes = 48 << 10;
  options.reducer.shard = shard;
  return options;
}

// What a worker that dies throws: nobody but the worker itself sees it.
struct Death {};

// A stream whose owner is held up now and then, and which moves a part of what it could.
class UnevenStream final : public Stream {
 public:
  UnevenStream(std::unique_ptr<Stream> stream, std::uint64_t seed)
      : stream_(std::move(stream)), writes_(seed), reads_(~seed) {}
  std::size_t write_some(std::span<const std::byte> head,
                         std::span<const std::byte> body) override {
    if (holds_up(writes_)) return stream_->write_some(head, body.first(body.size() / 2));
    return stream_->write_some(head, body);
  }
  std::size_t read_some(std::span<std::byte> head, std::span<std::byte> body) override {
    if (holds_up(reads_)) return stream_->read_some(head, body.first(body.size() / 2));
    return stream_->read_some(head, body);
  }
  bool prepare_wait(Direction direction, std::vector<pollfd>& fds) override {
    return stream_->prepare_wait(direction, fds);
  }
  void finish_wait(Direction direction) override { stream_->finish_wait(direction); }

 private:
  static bool holds_up(std::mt19937_64& random) {
    if (random() % 64 != 0) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    return true;
  }

  const std::unique_ptr<Stream> stream_;
  std::mt19937_64 writes_;  // one thread writes, one reads
  std::mt19937_64 reads_;
};

// Forms generations of those that live, as a centre would.
class Centre {
 public:
  struct Place {
    std::unique_ptr<Transport> transport;
    std::vector<int> roster;
  };

  // With a seed the streams are uneven.
  explicit Centre(std::set<int> members, std::optional<std::uint64_t> seed = {})
      : living_(std::move(members)), seed_(seed) {}

  // Returns in the next generation, when all who live have come.
  Place regroup(int member) {
    std::unique_lock lock(mutex_);
    const int before = generation_;
    waiting_.insert(member);
    form();
    changed_.wait(lock, [&] { return generation_ != before && places_.contains(member); });
    Place place = std::move(places_.at(member));
    places_.erase(member);
    return place;
  }
  // A newcomer is waited for from now on.
  void expect(int member) {
    const std::lock_guard lock(mutex_);
    living_.insert(member);
    changed_.notify_all();
  }
  // Until a newcomer is expected; false when it never will be.
  bool invites(int member) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return over_ || living_.contains(member); });
    return living_.contains(member);
  }
  void end() {
    const std::lock_guard lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }
  void gone(int member) {
    const std::lock_guard lock(mutex_);
    living_.erase(member);
    form();
  }

 private:
  void form() {
    if (living_.empty() || waiting_ != living_) return;
    // By messages: threads that share memory might still write into that of a rank that has left.
    LocalOptions by_messages;
    by_messages.shared_memory = false;
    if (seed_) {
      by_messages.wrap_stream = [this](int rank, std::unique_ptr<Stream> stream) {
        return std::make_unique<UnevenStream>(std::move(stream),
                                              *seed_ + 64 * streams_++ + index_of(rank));
      };
    }
    auto group = make_local_group(static_cast<int>(living_.size()), by_messages);
    std::size_t rank = 0;
    for (const int member : living_) {
      places_[member] = {std::move(group[rank++]), {living_.begin(), living_.end()}};
    }
    waiting_.clear();
    ++generation_;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<int> living_;
  std::set<int> waiting_;
  std::map<int, Place> places_;
  int generation_ = 0;
  bool over_ = false;
  const std::optional<std::uint64_t> seed_;
  std::atomic<std::uint64_t> streams_{0};
};

struct Seen {
  std::string hash;
  std::map<std::int64_t, double> losses;      // as reported
  std::map<std::int64_t, double> norms;       // as reported
  std::map<std::int64_t, double> validation;  // as reported
  std::vector<std::int64_t> reported;
  ValidationRecord record;
  std::vector<Levelled> levelled;
  std::int64_t began = 0;  // after so many steps, when the state was lost last
  bool died = false;
  std::string mismatch;
};

class Worker;
// Called at every place; throws Death to die, or Error as a communicator would.
using Hook = std::function<void(Worker&, std::string_view place, std::int64_t step)>;
// Called after an Error, when the trainer is detached.
using Detached = std::function<void(Worker&)>;

class Worker {
 public:
  // Without `out` it saves nothing.
  Worker(int name, TrainerOptions options, Centre& centre, const Hook& hook, const std::string& out,
         const GpuParts* gpu)
      : member(name),
        centre_(centre),
        options_(with_hook(std::move(options), hook)),
        replica_(gpu != nullptr ? make_gpu_replica(replica_options(options_, 0, 1), *gpu)
                                : make_cpu_replica(replica_options(options_, 0, 1), pool_)),
        trainer(options_, short_samples(60), short_samples(9), *replica_),
        out_(out),
        checkpoints_(
            trainer,
            {.out = out, .save_every = 2, .keep_last = 0, .wait = true, .last_step = kSteps},
            nullptr) {}

  Trainer& of() { return trainer; }
  Replica& replica() { return *replica_; }
  Communicator& communicator() { return *communicator_; }
  Centre& centre() { return centre_; }
  int generation() const { return static_cast<int>(seen.levelled.size()); }

  void live(const std::function<Requests(Worker&)>& requests, const Detached& detached) {
    for (;;) {
      Centre::Place place = centre_.regroup(member);
      roster = place.roster;
      communicator_ = std::make_unique<Communicator>(
          std::make_unique<PlanEngine>(std::move(place.transport)), std::chrono::seconds(20));
      try {
        if (!train(requests)) return;
      } catch (const Death&) {
        die();
        return;
      } catch (const Error& error) {
        communicator_->abort(error.what());
        if (error.code() == ErrorCode::kReplicaMismatch) {  // it would come again and again
          seen.mismatch = error.what();
          centre_.gone(member);
          return;
        }
      }
      trainer.detach();
      communicator_.reset();
      if (detached) detached(*this);
    }
  }

  const int member;
  Seen seen;
  std::vector<int> roster;

 private:
  TrainerOptions with_hook(TrainerOptions options, const Hook& hook) {
    options.at = [this, hook](std::string_view place, std::int64_t step) {
      if (hook) hook(*this, place, step);
    };
    return options;
  }

  // True when there will be another generation.
  bool train(const std::function<Requests(Worker&)>& requests) {
    seen.levelled.push_back(level(trainer, *communicator_));
    if (seen.levelled.back().lost) {
      checkpoints_.wait();
      ResumePoint point = find_newest_checkpoint(*communicator_, out_);
      if (point.run) {
        restore(trainer, point);
      } else if (communicator_->rank() == 0) {
        initialise(*replica_, options_.seed, pool_);
      }
      trainer.start();
      seen.began = trainer.steps_done();
      seen.reported.clear();
    }
    checkpoints_.regroup();
    const auto report = [&](const StepReport& done) {
      seen.reported.push_back(done.step);
      seen.losses[done.step] = done.loss;
      seen.norms[done.step] = done.gradient_norm;
      if (done.validation_loss) seen.validation[done.step] = *done.validation_loss;
    };
    const auto save = [&](const StepReport& done) {
      if (out_.empty()) trainer.at("save", done.step);
      communicator_->barrier();
      checkpoints_.after_step({.stopping = done.stop != 0, .requested = done.save});
    };
    const RunEnd end =
        trainer.run([&] { return requests ? requests(*this) : Requests{}; }, report, save);
    if (end == RunEnd::kRegroup) {
      const std::vector<int>& leaving = trainer.last_report()->leaving;
      if (std::ranges::find(leaving, communicator_->rank()) == leaving.end()) return true;
      centre_.gone(member);
      return false;
    }
    checkpoints_.finish(end == RunEnd::kStopped);
    seen.hash = trainer.verify();
    seen.record = trainer.validation();
    communicator_->barrier();
    centre_.gone(member);
    return false;
  }

  // Its memory stays, as that of a process would that others still map.
  void die() {
    seen.died = true;
    communicator_->abort("this worker dies");
    centre_.gone(member);
  }

  Centre& centre_;
  ThreadPool pool_{1};
  const TrainerOptions options_;
  std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<Replica> replica_;

 public:
  Trainer trainer;

 private:
  const std::string out_;
  RunCheckpoints checkpoints_;
};

struct Script {
  int workers = 1;
  std::set<int> newcomers = {};  // who wait from the start to be expected
  Hook hook = {};
  Detached detached = {};
  std::function<Requests(Worker&)> requests = {};
  std::string out = {};
  std::map<int, std::string> own_outs = {};  // of members that have folders of their own
  const GpuParts* gpu = nullptr;             // on the CPU without them
  std::optional<std::uint64_t> uneven = {};  // seed of streams that are held up
};

std::vector<Seen> play(const TrainerOptions& options, const Script& script) {
  std::set<int> members;
  for (int member = 0; member < script.workers; ++member) members.insert(member);
  Centre centre(members, script.uneven);
  std::set<int> all = members;
  all.insert(script.newcomers.begin(), script.newcomers.end());
  std::vector<std::unique_ptr<Worker>> workers;
  std::atomic<bool> expected{false};
  for (const int member : all) {
    const Hook hook = [&](Worker& worker, std::string_view place, std::int64_t step) {
      if (!script.hook) return;
      try {
        script.hook(worker, place, step);
      } catch (const Death&) {
        // Who is lost is replaced.
        if (!expected.exchange(true)) {
          for (const int newcomer : script.newcomers) centre.expect(newcomer);
        }
        throw;
      }
    };
    const auto own_out = script.own_outs.find(member);
    workers.push_back(std::make_unique<Worker>(
        member, options, centre, hook,
        own_out != script.own_outs.end() ? own_out->second : script.out, script.gpu));
  }
  std::vector<std::thread> threads;
  for (auto& worker : workers) {
    threads.emplace_back([&, worker = worker.get()] {
      const bool newcomer = script.newcomers.contains(worker->member);
      if (newcomer && !centre.invites(worker->member)) return;
      worker->live(script.requests, script.detached);
    });
  }
  for (std::size_t i = 0; i < threads.size(); ++i) {
    if (!script.newcomers.contains(workers[i]->member)) threads[i].join();
  }
  centre.end();
  for (std::thread& thread : threads) {
    if (thread.joinable()) thread.join();
  }
  std::vector<Seen> seen;
  for (auto& worker : workers) seen.push_back(std::move(worker->seen));
  return seen;
}

const Seen& alone() {
  static const Seen seen = play(tiny_training(false), {.workers = 1})[0];
  return seen;
}

// Every worker that has not died ends as one worker alone does, and has reported its steps once.
void expect_as_alone(const std::vector<Seen>& all, int living) {
  int ended = 0;
  for (const Seen& seen : all) {
    EXPECT_EQ(seen.mismatch, "");
    if (seen.hash.empty()) continue;
    ++ended;
    EXPECT_EQ(seen.hash, alone().hash);
    EXPECT_EQ(seen.record, alone().record);
    for (std::size_t i = 0; i < seen.reported.size(); ++i) {
      EXPECT_EQ(seen.reported[i], kSteps + 1 - static_cast<std::int64_t>(seen.reported.size() - i));
    }
    for (const auto& [step, loss] : seen.losses) EXPECT_EQ(loss, alone().losses.at(step));
    for (const auto& [step, norm] : seen.norms) EXPECT_EQ(norm, alone().norms.at(step));
    for (const auto& [step, loss] : seen.validation) EXPECT_EQ(loss, alone().validation.at(step));
  }
  EXPECT_EQ(ended, living);
}

constexpr std::array kPlaces = {"data",   "forward",    "bucket", "tail",   "norm", "update",
                                "gather", "validation", "verify", "report", "save", "end"};

// The victims die at this place of this step, when all of them are there.
Hook dies(const std::set<int>& victims, const std::string& place, std::int64_t step,
          const std::function<bool()>& may_die = {}) {
  auto there = std::make_shared<std::atomic<std::size_t>>(0);
  return [=](Worker& worker, std::string_view at, std::int64_t now) {
    if (!victims.contains(worker.member) || at != place || now != step) return;
    ++*there;
    while (*there < victims.size() || (may_die && !may_die())) std::this_thread::yield();
    throw Death();
  };
}

TEST(Levelling, ALossAtEveryPlaceChangesNoBit) {
  int cases = 0;
  for (const bool shard : {false, true}) {
    for (const int workers : {2, 3, 4, 5}) {
      for (const std::string place : kPlaces) {
        if (!shard && (place == "norm" || place == "gather")) continue;
        const int victim = ++cases % 2 == 0 ? 0 : workers - 1;
        const bool replaced = cases / 2 % 2 == 0;
        SCOPED_TRACE(fmt::format("{} workers, sharded {}, worker {} dies at {}, replaced {}",
                                 workers, shard, victim, place, replaced));
        Script script = {.workers = workers,
                         .hook = dies({victim}, place, place == "end" ? kSteps : 2)};
        if (replaced) script.newcomers = {workers};
        const std::vector<Seen> seen = play(tiny_training(shard), script);
        EXPECT_TRUE(seen[index_of(victim)].died);
        expect_as_alone(seen, workers - 1 + (replaced ? 1 : 0));
        for (const Seen& each : seen) {
          for (std::size_t i = 1; i < each.levelled.size(); ++i) {
            EXPECT_FALSE(each.levelled[i].lost);
          }
        }
      }
    }
  }
}

Error lost_connection() { return {ErrorCode::kPeerLost, "a worker has gone"}; }

// Something that happens to a member once, when it comes to a place of a step for the n-th time.
struct Fault {
  int member = 0;
  std::string place;
  std::int64_t step = 0;
  std::uint64_t call = 0;
  bool dies = false;  // or thinks that it has lost another one
  std::uint64_t calls = 0;
  bool happened = false;
};

// Up to three faults; one of the workers has none.
std::vector<Fault> draw_faults(std::mt19937_64& random, int workers, bool replaced) {
  const auto below = [&](std::uint64_t count) { return random() % count; };
  const auto spared = static_cast<int>(below(index_of(workers)));
  std::vector<Fault> faults;
  for (std::uint64_t left = 1 + below(3); left > 0; --left) {
    const auto member = static_cast<int>(below(index_of(workers + (replaced ? 1 : 0))));
    if (member == spared) continue;
    const std::uint64_t place = below(kPlaces.size() + 1);
    faults.push_back({.member = member,
                      .place = place < kPlaces.size() ? kPlaces.at(place) : "transfer",
                      .step = 1 + static_cast<std::int64_t>(below(kSteps)),
                      .call = below(3),
                      .dies = below(4) != 0});
  }
  return faults;
}

// Ranks know more or less of a step when its generation ends, and the next one may end early, too.
TEST(Levelling, LossesAtUnevenMomentsChangeNoBit) {
  const GpuParts pretended = test::pretended_parts();
  const test::Seeds seeds(30);
  for (std::uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    std::mt19937_64 random(seed);
    const bool shard = random() % 2 == 0;
    const int workers = 2 + static_cast<int>(random() % 4);
    const bool replaced = random() % 2 == 0;
    std::vector<Fault> faults = draw_faults(random, workers, replaced);
    const bool gpu = random() % 3 == 0;
    TrainerOptions options = tiny_training(shard);
    options.reducer.on_device = gpu && random() % 2 == 0;
    std::string told =
        fmt::format("seed {}: {} workers, sharded {}, replaced {}, GPUs {}, sums on them {}", seed,
                    workers, shard, replaced, gpu, options.reducer.on_device);
    for (const Fault& fault : faults) {
      told += fmt::format("; worker {} {} at {} of step {}", fault.member,
                          fault.dies ? "dies" : "gives up", fault.place, fault.step);
    }
    SCOPED_TRACE(told);
    Script script = {.workers = workers, .uneven = seed};
    if (replaced) script.newcomers = {workers};
    if (gpu) script.gpu = &pretended;
    std::mutex mutex;
    int deaths = 0;
    script.hook = [&](Worker& worker, std::string_view at, std::int64_t step) {
      const std::lock_guard lock(mutex);
      for (Fault& fault : faults) {
        if (fault.happened || worker.member != fault.member || at != fault.place ||
            step != fault.step || fault.calls++ < fault.call) {
          continue;
        }
        fault.happened = true;
        if (!fault.dies) throw lost_connection();
        ++deaths;
        throw Death();
      }
    };
    const std::vector<Seen> seen = play(options, script);
    // Who is never to replace anybody does not come.
    expect_as_alone(seen, workers - deaths + (deaths > 0 && replaced ? 1 : 0));
    for (const Seen& each : seen) {
      for (std::size_t i = 1; i < each.levelled.size(); ++i) {
        EXPECT_FALSE(each.levelled[i].lost && deaths < 2);
      }
    }
  }
}

// The same with replicas on GPUs, whose sums go through the host or from GPU to GPU.
TEST(Levelling, ALossBesideGpusChangesNoBit) {
  const GpuParts pretended = test::pretended_parts();
  for (const bool on_device : {false, true}) {
    for (const bool shard : {false, true}) {
      for (const std::string place : {"tail", "update", "gather"}) {
        if (!shard && place == "gather") continue;
        SCOPED_TRACE(fmt::format("on device {}, sharded {}, at {}", on_device, shard, place));
        TrainerOptions options = tiny_training(shard);
        options.reducer.on_device = on_device;
        expect_as_alone(
            play(options,
                 {.workers = 3, .newcomers = {3}, .hook = dies({1}, place, 2), .gpu = &pretended}),
            3);
      }
    }
  }
}

// Who holds the same shards must not die together; others may.
TEST(Levelling, TwoLossesAtOnceThatAreNoBuddies) {
  for (const auto& [workers, victims] :
       {std::pair(4, std::set{0, 2}), {4, {1, 3}}, {5, {0, 4}}, {5, {2, 3}}}) {
    for (const std::string place : {"tail", "update", "gather"}) {
      SCOPED_TRACE(fmt::format("{} workers, {} and {} die at {}", workers, *victims.begin(),
                               *victims.rbegin(), place));
      const auto seen =
          play(tiny_training(true), {.workers = workers, .hook = dies(victims, place, 2)});
      expect_as_alone(seen, workers - 2);
      for (const Seen& each : seen) {
        if (!each.died) {
          EXPECT_FALSE(each.levelled.at(1).lost);
        }
      }
    }
  }
}

TEST(Levelling, LostBuddiesTakeTheStateWithThem) {
  for (const auto& [workers, victims] :
       {std::pair(3, std::set{0, 1}), {4, {0, 1}}, {4, {2, 3}}, {5, {2, 3, 4}}}) {
    const std::set<int> dying = victims;
    for (const bool shard : {true, false}) {
      for (const bool saved : {true, false}) {
        if (!shard && saved) continue;
        SCOPED_TRACE(fmt::format("{} workers, sharded {}, saved {}", workers, shard, saved));
        TemporaryFolder out;
        Script script = {.workers = workers};
        if (saved) script.out = out.path();
        script.hook =
            dies(dying, "tail", 4, [&] { return !saved || !list_checkpoints(out.path()).empty(); });
        const auto seen = play(tiny_training(shard), script);
        expect_as_alone(seen, workers - static_cast<int>(dying.size()));
        for (const Seen& each : seen) {
          if (each.died) continue;
          const bool lost = shard && workers > 3;  // of three one is left, and has it all
          EXPECT_EQ(each.levelled.at(1).lost, lost);
          EXPECT_EQ(each.began, lost && saved ? 2 : 0);
        }
        if (saved) {
          EXPECT_THAT(list_checkpoints(out.path()), ElementsAre(4, 2));
        }
      }
    }
  }
}

// Without buddies a shard goes with its worker.
TEST(Levelling, OneLossWithoutBuddiesGoesBackToTheCheckpoint) {
  TrainerOptions options = tiny_training(true);
  options.reducer.buddy = false;
  for (const int victim : {0, 2}) {
    for (const bool saved : {true, false}) {
      SCOPED_TRACE(fmt::format("worker {} dies, saved {}", victim, saved));
      TemporaryFolder out;
      Script script = {.workers = 3};
      if (saved) script.out = out.path();
      script.hook = dies({victim}, "tail", 4,
                         [&] { return !saved || !list_checkpoints(out.path()).empty(); });
      const auto seen = play(options, script);
      expect_as_alone(seen, 2);
      for (const Seen& each : seen) {
        if (each.died) continue;
        EXPECT_TRUE(each.levelled.at(1).lost);
        EXPECT_EQ(each.began, saved ? 2 : 0);
      }
    }
  }
}

// Folders may be on several hosts: the host of rank 0 is gone, with its buddy and their folder.
TEST(Levelling, TheNewestCheckpointMayBeAtAnySurvivor) {
  for (const int holder : {2, 3}) {
    SCOPED_TRACE(fmt::format("worker {} has a checkpoint", holder));
    std::vector<TemporaryFolder> outs(4);
    const std::string path = outs[index_of(holder)].path();
    play(tiny_training(false), {.workers = 1, .out = path});
    std::filesystem::remove_all(checkpoint_path(path, 4));
    ASSERT_THAT(list_checkpoints(path), ElementsAre(2));
    Script script = {.workers = 4, .hook = dies({0, 1}, "tail", 4)};
    for (int member = 0; member < 4; ++member) {
      script.own_outs[member] = outs[index_of(member)].path();
    }
    const auto seen = play(tiny_training(true), script);
    expect_as_alone(seen, 2);
    for (const int member : {2, 3}) {
      EXPECT_TRUE(seen[index_of(member)].levelled.at(1).lost);
      EXPECT_EQ(seen[index_of(member)].began, 2);
    }
    // Rank 0 saves, which is worker 2 now.
    EXPECT_EQ(list_checkpoints(outs[2].path()).front(), 4);
    EXPECT_EQ(list_checkpoints(outs[3].path()).size(), holder == 3 ? 1u : 0u);
  }
}

// A newcomer is let in after step 1 or 2, as the centre would ask for it through rank 0.
std::function<Requests(Worker&)> lets_in(int newcomer) {
  return [=](Worker& worker) {
    Requests wanted;
    if (worker.member == 0 && worker.generation() == 1 && worker.trainer.steps_done() == 1) {
      worker.centre().expect(newcomer);
      wanted.regroup = true;
    }
    return wanted;
  };
}

TEST(Levelling, ANewcomerGetsTheStateBetweenTwoSteps) {
  for (const bool shard : {false, true}) {
    for (const int workers : {1, 2, 4}) {
      SCOPED_TRACE(fmt::format("{} workers, sharded {}", workers, shard));
      const auto seen =
          play(tiny_training(shard),
               {.workers = workers, .newcomers = {workers}, .requests = lets_in(workers)});
      expect_as_alone(seen, workers + 1);
      const Levelled& levelled = seen.back().levelled.at(0);
      EXPECT_FALSE(levelled.lost);
      EXPECT_EQ(levelled.step, 2);
      EXPECT_THAT(seen.back().reported, ElementsAre(2, 3, 4));
      EXPECT_EQ(seen[0].reported.size(), 4u);
      EXPECT_EQ(seen[0].levelled.size(), 2u);
    }
  }
}

// The donor, the newcomer or another dies while the state travels: the others level again.
TEST(Levelling, ALossDuringTheTransfer) {
  for (const bool shard : {false, true}) {
    for (const int victim : {0, 1, 2, 3}) {
      SCOPED_TRACE(fmt::format("sharded {}, worker {} dies", shard, victim));
      const auto seen = play(tiny_training(shard), {.workers = 3,
                                                    .newcomers = {3},
                                                    .hook = dies({victim}, "transfer", 3),
                                                    .requests = lets_in(3)});
      expect_as_alone(seen, 3);
      for (const Seen& each : seen) {
        if (each.died) continue;
        EXPECT_EQ(each.levelled.back().step, 2);
        EXPECT_FALSE(each.levelled.back().lost);
      }
    }
  }
}

TEST(Levelling, WhoLeavesTakesNothingAlong) {
  for (const bool shard : {false, true}) {
    for (const std::set<int>& leavers : {std::set{0}, {3}, {0, 1}, {1, 2}, {0, 1, 2}}) {
      const auto requests = [&](Worker& worker) {
        const bool asks = leavers.contains(worker.member) && worker.trainer.steps_done() >= 1;
        return Requests{.leave = asks ? 2 : 0};
      };
      const auto seen = play(tiny_training(shard), {.workers = 4, .requests = requests});
      expect_as_alone(seen, 4 - static_cast<int>(leavers.size()));
      // Of buddies one goes at a time.
      const bool twice = shard && leavers.contains(0) && leavers.contains(1);
      EXPECT_EQ(seen[3].levelled.size(), leavers.contains(3) ? 1u : twice ? 3u : 2u);
      for (const Levelled& levelled : seen[3].levelled) {
        if (levelled.step > 0) {
          EXPECT_FALSE(levelled.lost);
        }
      }
    }
  }
}

TEST(Levelling, ARequestIsRepeatedUntilItsStepIsDone) {
  TemporaryFolder out;
  int polls = 0;
  Script script = {.workers = 3, .hook = dies({2}, "tail", 3), .out = out.path()};
  script.requests = [&](Worker& worker) {
    const bool asks = worker.member == 1 && worker.trainer.steps_done() == 2;
    return Requests{.save = asks && polls++ == 0};
  };
  expect_as_alone(play(tiny_training(false), script), 2);
  EXPECT_EQ(polls, 2);  // the second time for the step that is computed again
  EXPECT_THAT(list_checkpoints(out.path()), ElementsAre(4, 3, 2));
}

// Without shards: some ranks have done the step, one has only its tail, or not even that.
TEST(Levelling, WhoIsAStepBehindIsBroughtForward) {
  for (const std::string place : {"update", "tail"}) {
    Script script = {.workers = 3};
    std::atomic<int> updating{0};  // ranks that need nobody any more to do the step
    script.hook = [&](Worker& worker, std::string_view at, std::int64_t step) {
      if (worker.generation() != 1 || step != 2) return;
      if (at == "update") {
        ++updating;
        updating.notify_all();
      }
      if (worker.member != 2 || at != place) return;
      if (at == "update") {
        for (int ready = updating; ready < 3; ready = updating) updating.wait(ready);
      }
      throw lost_connection();
    };
    std::atomic<int> behind{0};
    script.detached = [&](Worker& worker) {
      if (worker.trainer.steps_done() == 1) ++behind;
    };
    const auto seen = play(tiny_training(false), script);
    expect_as_alone(seen, 3);
    EXPECT_EQ(seen[0].levelled.at(1).step, place == "update" ? 2 : 1);
    EXPECT_EQ(behind, place == "update" ? 1 : 3);
  }
}

// With shards a step is done once one survivor knows its norm. What a rank knows when its
// generation ends is a matter of moments: here ranks forget what they could as well not have known.
enum class Knows { kSums, kNorm, kUpdated };

// What comes from others when the exchange of parameters ends early may be anything.
void tear(Replica& replica, Range whole) {
  replica.complete_parameters([&](std::span<float> values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i < whole.begin || i >= whole.end) values[i] = std::numeric_limits<float>::quiet_NaN();
    }
  });
}

void forget(Worker& worker, Knows knows) {
  TrainerStanding& standing = worker.trainer.standing();
  EXPECT_EQ(standing.step, 1);
  ASSERT_TRUE(standing.open);
  EXPECT_TRUE(standing.open->decided);
  EXPECT_EQ(standing.open->updated, knows == Knows::kUpdated);
  if (knows == Knows::kSums) {
    standing.open->decided = false;
    standing.open->norm = 0;
  }
  if (knows == Knows::kUpdated) tear(worker.replica(), standing.open->held);
}

// It has done the step, and makes as if the parameters of others had not come.
void undo(Worker& worker) {
  TrainerStanding& standing = worker.trainer.standing();
  EXPECT_EQ(standing.step, 2);
  OpenStep open;
  open.report = standing.last->report;
  open.held = worker.replica().shard();
  open.decided = true;
  open.begun = true;
  open.updated = true;
  standing.open = open;
  standing.step = 1;
  standing.last.reset();
  tear(worker.replica(), open.held);
}

// All come to their places in step 2, then the first generation ends. `dead` dies.
std::vector<Seen> end_in_step_two(int workers, int dead,
                                  const std::function<std::string_view(int member)>& place_of,
                                  const std::function<void(Worker&)>& detached) {
  Script script = {.workers = workers};
  std::atomic<int> there{0};
  script.hook = [&](Worker& worker, std::string_view at, std::int64_t step) {
    if (worker.generation() != 1 || step != 2 || at != place_of(worker.member)) return;
    ++there;
    while (there < workers) std::this_thread::yield();
    if (worker.member == dead) throw Death();
    throw lost_connection();
  };
  script.detached = [&](Worker& worker) {
    if (worker.generation() == 1) detached(worker);
  };
  return play(tiny_training(true), script);
}

TEST(Levelling, AStepIsDoneOnceSomebodyKnowsItsNorm) {
  using enum Knows;
  const std::vector<std::vector<Knows>> all = {
      {kSums, kSums, kSums, kSums},       {kSums, kNorm, kSums, kSums},
      {kUpdated, kSums, kSums, kNorm},    {kSums, kSums, kSums, kUpdated},
      {kNorm, kNorm, kNorm, kNorm},       {kUpdated, kUpdated, kUpdated, kUpdated},
      {kUpdated, kNorm, kUpdated, kSums},
  };
  for (const int dead : {-1, 0, 2}) {
    for (const std::vector<Knows>& know : all) {
      const auto seen = end_in_step_two(
          4, dead,
          [&](int member) { return know[index_of(member)] == kUpdated ? "gather" : "update"; },
          [&](Worker& worker) { forget(worker, know[index_of(worker.member)]); });
      expect_as_alone(seen, dead < 0 ? 4 : 3);
      bool decided = false;
      for (int member = 0; member < 4; ++member) {
        decided = decided || (member != dead && know[index_of(member)] != kSums);
      }
      EXPECT_EQ(seen[3].levelled.at(1).step, decided ? 2 : 1);
      EXPECT_FALSE(seen[3].levelled.at(1).lost);
    }
  }
}

// Of three workers each has all sums: one has done the step as soon as it knows the norm.
TEST(Levelling, WhoHasDoneTheStepTellsItsNorm) {
  for (const int done : {1, 2}) {
    const auto seen = end_in_step_two(
        3, 0, [&](int member) { return member == done ? "verify" : "update"; },
        [&](Worker& worker) {
          if (worker.member != done) forget(worker, Knows::kSums);
        });
    expect_as_alone(seen, 2);
    EXPECT_EQ(seen[1].levelled.at(1).step, 2);
  }
}

TEST(Levelling, WhoMissedTheParametersGetsThem) {
  for (const int dead : {-1, 1}) {
    for (const std::set<int>& torn : {std::set{0}, {2}, {0, 3}, {0, 2, 3}}) {
      const auto seen = end_in_step_two(
          4, dead, [](int) { return "verify"; },
          [&](Worker& worker) {
            if (torn.contains(worker.member)) undo(worker);
          });
      expect_as_alone(seen, dead < 0 ? 4 : 3);
      EXPECT_EQ(seen[3].levelled.at(1).step, 2);
    }
  }
}

// A checkpoint that was due is written, whoever dies while it is being saved.
TEST(Levelling, ASaveThatWasLostIsMade) {
  TemporaryFolder expected;
  play(tiny_training(false), {.workers = 1, .out = expected.path()});
  ASSERT_THAT(list_checkpoints(expected.path()), ElementsAre(4, 2));
  for (const bool shard : {false, true}) {
    for (const int victim : {0, 2}) {
      for (const std::string place : {"save", "verify"}) {
        SCOPED_TRACE(fmt::format("sharded {}, worker {} dies at {}", shard, victim, place));
        TemporaryFolder out;
        TrainerOptions options = tiny_training(shard);
        if (place == "verify") options.verify_every = 0;  // that of the save is left
        const auto seen =
            play(options, {.workers = 3, .hook = dies({victim}, place, 2), .out = out.path()});
        expect_as_alone(seen, 2);
        EXPECT_THAT(list_checkpoints(out.path()), ElementsAre(4, 2));
        for (const std::int64_t step : {2, 4}) {
          const TrainingState saved = load_checkpoint(checkpoint_path(out.path(), step));
          const TrainingState right = load_checkpoint(checkpoint_path(expected.path(), step));
          EXPECT_TRUE(std::ranges::equal(saved.parameters.span(), right.parameters.span()));
          EXPECT_TRUE(std::ranges::equal(saved.first_moment.span(), right.first_moment.span()));
          EXPECT_TRUE(std::ranges::equal(saved.second_moment.span(), right.second_moment.span()));
        }
      }
    }
  }
}

// Carries out collectives as another engine does, but damages what an exchange of state brings.
class DamagingEngine final : public Engine {
 public:
  DamagingEngine(std::unique_ptr<Engine> engine, bool damages)
      : engine_(std::move(engine)), damages_(damages) {}
  int rank() const override { return engine_->rank(); }
  int world_size() const override { return engine_->world_size(); }
  std::string name_of(int rank) const override { return engine_->name_of(rank); }
  Supervisor& supervisor() override { return engine_->supervisor(); }
  Algorithm choose(const Call& call) const override { return engine_->choose(call); }
  Outcome run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay) override {
    const Outcome outcome = engine_->run(call, stamp, stay);
    if (damages_ && call.collective == Collective::kAllToAll && call.out.bytes() > 1000) {
      call.out.data()[500] ^= std::byte{1};
    }
    return outcome;
  }
  std::unique_ptr<Engine> split(const std::vector<int>& members, std::uint32_t group) override {
    return engine_->split(members, group);
  }
  Buffer allocate(std::size_t bytes) override { return engine_->allocate(bytes); }

 private:
  const std::unique_ptr<Engine> engine_;
  const bool damages_;
};

TEST(Levelling, AStateThatArrivesDamagedReplacesNothing) {
  auto group = make_local_group(2);
  std::vector<std::optional<Error>> errors(2);
  std::vector<float> before;
  std::vector<float> after;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const TrainerOptions options = tiny_training(false);
      ThreadPool pool(1);
      const auto replica = make_cpu_replica(replica_options(options, 0, 1), pool);
      initialise(*replica, static_cast<std::uint64_t>(rank), pool);
      Trainer trainer(options, short_samples(60), short_samples(9), *replica);
      trainer.standing().has_state = true;
      trainer.standing().step = rank == 0 ? 2 : 1;
      const auto parameters = [&] {
        std::vector<float> values(replica->layout().size());
        replica->get_parameters(values);
        return values;
      };
      if (rank == 1) before = parameters();
      Communicator communicator(
          std::make_unique<DamagingEngine>(
              std::make_unique<PlanEngine>(std::move(group[index_of(rank)])), rank == 1),
          std::chrono::seconds(20));
      try {
        level(trainer, communicator);
      } catch (const Error& error) {
        errors[index_of(rank)] = error;
      }
      trainer.detach();
      if (rank == 0) return;
      after = parameters();
      EXPECT_EQ(trainer.steps_done(), 1);
      EXPECT_TRUE(trainer.standing().has_state);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(before, after);
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_EQ(error->code(), ErrorCode::kPeerLost);
    EXPECT_EQ(error->rank(), 1);
    EXPECT_THAT(error->what(), ::testing::HasSubstr("the state that rank 0 (thread) sent arrived "
                                                    "damaged"));
  }
}

TEST(Requests, WhatAllRanksDoIsAFunctionOfWhatTheyRequest) {
  const auto decided = [](std::vector<Requests> by_rank, bool shard = false, bool buddy = true) {
    ReducerOptions reducer;
    reducer.shard = shard;
    reducer.buddy = buddy;
    StepReport report;
    decide_requests(by_rank, reducer, report);
    return report;
  };
  EXPECT_FALSE(decided({{}, {}}).regroup);
  EXPECT_TRUE(decided({{}, {.regroup = true}}).regroup);
  EXPECT_TRUE(decided({{}, {.save = true}}).save);
  EXPECT_EQ(decided({{.stop = 2}, {.stop = 15}}).stop, 15);
  const Requests asked{.leave = 1};
  const Requests goes{.leave = 2};
  EXPECT_THAT(decided({{}, asked}).leaving, IsEmpty());
  EXPECT_THAT(decided({{}, goes, asked}).leaving, ElementsAre(1));
  EXPECT_FALSE(decided({{}, goes, asked}).save);
  EXPECT_THAT(decided({goes, goes, {}, goes}).leaving, ElementsAre(0, 1, 3));
  EXPECT_THAT(decided({goes, goes, {}, goes}, true).leaving, ElementsAre(0, 3));
  EXPECT_THAT(decided({goes, goes, {}, goes}, true, false).leaving, ElementsAre(0, 1, 3));
  EXPECT_TRUE(decided({goes, {}}, true, false).save);
  const StepReport all = decided({asked, goes, asked});
  EXPECT_THAT(all.leaving, IsEmpty());
  EXPECT_EQ(all.stop, 15);
}

}  // namespace
}  // namespace lockstep::levelling_test
