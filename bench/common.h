#pragma once

// What the peers' programs and the limits share, so that all are measured as `lockstep bench
// allreduce` measures: the result is checked first, every iteration starts from freshly written
// input (not timed), its time is that of the slowest rank, and above 64 KiB a barrier comes first.

#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace bench {

constexpr std::size_t kMostWithoutBarrier = 64 * 1024;
constexpr std::size_t kMostIterations = 20000;

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::_Exit(1);
}

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One rank's side of what is measured.
class Subject {
 public:
  Subject(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
  virtual ~Subject() = default;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  // The operation on these floats, to be called many times; preparing it is not timed.
  virtual std::function<void()> prepare(float* data, std::size_t count) = 0;
  virtual void barrier() = 0;
  // Replaces every value by the maximum over ranks.
  virtual void maximum(std::vector<double>& values) = 0;
  // Limits move bytes and leave no sum behind.
  virtual bool computes_sum() const { return true; }

 private:
  const int rank_;
  const int ranks_;
};

struct Command {
  std::size_t bytes = 0;
  double seconds = 0.3;
};

// What to measure: sizes on the command line, or with "--serve FOLDER" lines "BYTES SECONDS" from
// the pipe FOLDER/RANK. A rank that waits at its pipe sleeps, which no wait inside MPI does.
class Commands {
 public:
  Commands(std::vector<std::string> arguments, int rank) : sizes_(std::move(arguments)) {
    if (sizes_.size() != 2 || sizes_[0] != "--serve") return;
    pipe_.open(sizes_[1] + "/" + std::to_string(rank));
    if (!pipe_) fail("no pipe in " + sizes_[1]);
    serving_ = true;
  }

  std::optional<Command> next() {
    Command command;
    if (serving_) {
      std::string line;
      if (!std::getline(pipe_, line)) return std::nullopt;
      std::istringstream(line) >> command.bytes >> command.seconds;
    } else {
      if (next_ == sizes_.size()) return std::nullopt;
      command.bytes = std::stoull(sizes_[next_++]);
    }
    if (command.bytes == 0 || command.bytes % sizeof(float) != 0) fail("wrong size");
    return command;
  }

 private:
  std::vector<std::string> sizes_;
  std::size_t next_ = 0;
  bool serving_ = false;
  std::ifstream pipe_;
};

struct FreeAligned {
  void operator()(float* data) const { std::free(data); }
};
using Floats = std::unique_ptr<float, FreeAligned>;

inline Floats allocate(std::size_t bytes) {
  const std::size_t page = 4096;
  const std::size_t rounded = (bytes + page - 1) / page * page;
  Floats data(static_cast<float*>(std::aligned_alloc(page, rounded)));
  if (data == nullptr) throw std::bad_alloc();
  std::memset(data.get(), 0, rounded);
  return data;
}

class Measurement {
 public:
  Measurement(Subject& subject, const Command& command)
      : subject_(subject),
        command_(command),
        count_(command.bytes / sizeof(float)),
        data_(allocate(command.bytes)),
        operation_(subject.prepare(data_.get(), count_)) {
    for (std::size_t i = 0; i < kPeriod; ++i) {
      input_[i] = value(i, subject.rank());
      for (int r = 0; r < subject.ranks(); ++r) expected_[i] += value(i, r);
    }
  }

  void run() {
    iterate();
    bool correct = check();
    std::vector<double> times(choose_iterations());
    for (double& time : times) time = iterate();
    correct = check() && correct;
    subject_.maximum(times);
    if (subject_.rank() == 0) print(times, correct);
  }

 private:
  // Small whole numbers with a prime period: sums are exact, misplaced chunks are noticed.
  static constexpr std::size_t kPeriod = 4093;
  static float value(std::size_t index, int rank) {
    return static_cast<float>((index + 5 * static_cast<std::size_t>(rank)) % 13);
  }

  double iterate() {
    for (std::size_t done = 0; done < count_; done += kPeriod) {
      std::memcpy(data_.get() + done, input_, std::min(kPeriod, count_ - done) * sizeof(float));
    }
    if (command_.bytes > kMostWithoutBarrier) subject_.barrier();
    const double start = now();
    operation_();
    return now() - start;
  }

  bool check() {
    std::vector<double> wrong = {0};
    for (std::size_t done = 0; subject_.computes_sum() && done < count_; done += kPeriod) {
      const std::size_t bytes = std::min(kPeriod, count_ - done) * sizeof(float);
      if (std::memcmp(data_.get() + done, expected_, bytes) != 0) wrong[0] = 1;
    }
    subject_.maximum(wrong);
    return wrong[0] == 0;
  }

  std::size_t choose_iterations() {
    const int trials = command_.bytes <= kMostWithoutBarrier ? 50 : 2;
    const double start = now();
    for (int i = 0; i < trials; ++i) iterate();
    const double each = (now() - start) / trials;
    std::vector<double> chosen = {
        subject_.rank() == 0 ? std::clamp(command_.seconds / each, 3.0, double{kMostIterations})
                             : 0};
    subject_.maximum(chosen);
    return static_cast<std::size_t>(chosen[0]);
  }

  void print(std::vector<double>& times, bool correct) const {
    std::sort(times.begin(), times.end());
    std::printf(
        "{\"ranks\":%d,\"bytes\":%zu,\"min_us\":%.3f,\"median_us\":%.3f,\"p99_us\":%.3f,"
        "\"correct\":%s}\n",
        subject_.ranks(), command_.bytes, times.front() * 1e6, times[times.size() / 2] * 1e6,
        times[times.size() * 99 / 100] * 1e6, correct ? "true" : "false");
    std::fflush(stdout);
  }

  Subject& subject_;
  const Command command_;
  const std::size_t count_;
  const Floats data_;
  const std::function<void()> operation_;
  float input_[kPeriod] = {};
  float expected_[kPeriod] = {};
};

inline void measure_all(Subject& subject, Commands& commands) {
  while (const auto command = commands.next()) Measurement(subject, *command).run();
}

// What forked ranks share: a barrier and a place to compare numbers.
class Team {
 public:
  explicit Team(int ranks) : ranks_(static_cast<unsigned>(ranks)) {
    const std::size_t bytes = sizeof(Shared) + ranks_ * kMostIterations * sizeof(double);
    void* memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    shared_ = new (memory) Shared;
    values_ = reinterpret_cast<double*>(shared_ + 1);
  }

  void barrier() {
    const unsigned round = shared_->round.load();
    if (shared_->arrived.fetch_add(1) + 1 == ranks_) {
      shared_->arrived.store(0);
      shared_->round.store(round + 1);
      return;
    }
    while (shared_->round.load() == round) sched_yield();
  }

  void maximum(int rank, std::vector<double>& values) {
    const std::size_t count = values.size();
    std::copy(values.begin(), values.end(), values_ + static_cast<std::size_t>(rank) * count);
    barrier();
    for (std::size_t i = 0; i < count; ++i) {
      for (unsigned r = 0; r < ranks_; ++r) values[i] = std::max(values[i], values_[r * count + i]);
    }
    barrier();
  }

 private:
  struct alignas(64) Shared {
    std::atomic<unsigned> arrived{0};
    alignas(64) std::atomic<unsigned> round{0};
  };

  const unsigned ranks_;
  Shared* shared_;
  double* values_;
};

// Runs `body` for every rank in a process of its own; the first that fails ends all.
inline int fork_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      try {
        body(rank);
      } catch (const std::exception& error) {
        fail("rank " + std::to_string(rank) + ": " + error.what());
      }
      std::_Exit(0);
    }
    children.push_back(child);
  }
  int status = 0;
  while (::wait(&status) > 0) {
    if (status == 0) continue;
    for (const pid_t child : children) ::kill(child, SIGKILL);
    return 1;
  }
  return 0;
}

}  // namespace bench
