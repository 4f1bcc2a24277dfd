#include "lockstep/train/levelling.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
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
  options.reducer.bucket_bytes = 16 << 10;
  options.reducer.shard = shard;
  return options;
}

// What a worker that dies throws: nobody but the worker itself sees it.
struct Death {};

// Forms generations of those that live, as a centre would.
class Centre {
 public:
  struct Place {
    std::unique_ptr<Transport> transport;
    std::vector<int> roster;
  };

  explicit Centre(std::set<int> members) : living_(std::move(members)) {}

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
    auto group = make_local_group(static_cast<int>(living_.size()));
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
};

struct Seen {
  std::string hash;
  std::map<std::int64_t, double> losses;      // as reported
  std::map<std::int64_t, double> validation;  // as reported
  std::vector<std::int64_t> reported;
  ValidationRecord record;
  std::vector<Levelled> levelled;
  bool died = false;
};

class Worker;
// Called at every place; throws Death to die, or Error as a communicator would.
using Hook = std::function<void(Worker&, std::string_view place, std::int64_t step)>;
// Called after an Error, when the trainer is detached.
using Detached = std::function<void(Worker&)>;

class Worker {
 public:
  Worker(int member, TrainerOptions options, Centre& centre, const Hook& hook)
      : member(member),
        centre_(centre),
        options_(with_hook(std::move(options), hook)),
        replica_(make_cpu_replica(replica_options(options_, 0, 1), pool_)),
        trainer(options_, short_samples(60), short_samples(9), *replica_) {}

  Trainer& of() { return trainer; }
  Replica& replica() { return *replica_; }
  Communicator& communicator() { return *communicator_; }
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
        if (doomed) return die();
      }
      trainer.detach();
      communicator_.reset();
      if (detached) detached(*this);
    }
  }

  const int member;
  Seen seen;
  std::vector<int> roster;
  bool doomed = false;  // dies with the generation, if not before

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
      if (communicator_->rank() == 0) initialise(*replica_, options_.seed, pool_);
      trainer.start();
      seen.reported.clear();
    }
    const auto report = [&](const StepReport& done) {
      seen.reported.push_back(done.step);
      seen.losses[done.step] = done.loss;
      if (done.validation_loss) seen.validation[done.step] = *done.validation_loss;
    };
    const auto save = [&](const StepReport& done) {
      trainer.at("save", done.step);
      communicator_->barrier();
    };
    const RunEnd end =
        trainer.run([&] { return requests ? requests(*this) : Requests{}; }, report, save);
    if (end == RunEnd::kRegroup) {
      const std::vector<int>& leaving = trainer.last_report()->leaving;
      if (std::ranges::find(leaving, communicator_->rank()) == leaving.end()) return true;
      centre_.gone(member);
      return false;
    }
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
};

struct Script {
  int workers = 1;
  std::set<int> newcomers = {};  // who wait from the start to be expected
  Hook hook = {};
  Detached detached = {};
  std::function<Requests(Worker&)> requests = {};
};

std::vector<Seen> play(const TrainerOptions& options, const Script& script) {
  std::set<int> members;
  for (int member = 0; member < script.workers; ++member) members.insert(member);
  Centre centre(members);
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
    workers.push_back(std::make_unique<Worker>(member, options, centre, hook));
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
    if (seen.hash.empty()) continue;
    ++ended;
    EXPECT_EQ(seen.hash, alone().hash);
    EXPECT_EQ(seen.record, alone().record);
    for (std::size_t i = 0; i < seen.reported.size(); ++i) {
      EXPECT_EQ(seen.reported[i], kSteps + 1 - static_cast<std::int64_t>(seen.reported.size() - i));
    }
    for (const auto& [step, loss] : seen.losses) EXPECT_EQ(loss, alone().losses.at(step));
    for (const auto& [step, loss] : seen.validation) EXPECT_EQ(loss, alone().validation.at(step));
  }
  EXPECT_EQ(ended, living);
}

constexpr std::array kPlaces = {"data",   "forward",    "bucket", "tail", "norm", "update",
                                "gather", "validation", "verify", "save", "end"};

// The victims die at this place of this step, whatever generation it is.
Hook dies(std::set<int> victims, std::string place, std::int64_t step) {
  return [=](Worker& worker, std::string_view at, std::int64_t now) {
    if (!victims.contains(worker.member) || at != place || now != step) return;
    worker.doomed = true;
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

}  // namespace
}  // namespace lockstep::levelling_test
