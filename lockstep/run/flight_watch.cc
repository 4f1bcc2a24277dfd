#include "lockstep/run/flight_watch.h"

#include <fmt/format.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/train/run_checkpoints.h"

namespace lockstep {
namespace {

static_assert(std::string_view(kFlightFolder) == kFlightFolderOfRun);

constexpr int kCrashSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr auto kWritePatience = std::chrono::seconds(5);
constexpr int kCrashPatienceMs = 2000;

// What handlers can reach.
constinit std::atomic<int> flight_bell{-1};
constinit std::atomic<bool> flight_asked{false};
constinit std::atomic<int> flight_crash{0};
constinit std::atomic<bool> flight_crash_written{false};
constinit struct sigaction flight_before[65] = {};

void ring_bell() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(flight_bell, &one, sizeof one);
}

void on_ask(int) {
  const int error = errno;
  flight_asked = true;
  ring_bell();
  errno = error;
}

// The watch's own thread is not the one that crashes: it has its time to write, then the signal
// does what it would have done. One that a processor's fault has raised comes again by itself.
void on_crash(int signal, siginfo_t* info, void*) {
  const int error = errno;
  int none = 0;
  if (flight_crash.compare_exchange_strong(none, signal)) {
    ring_bell();
    for (int waited = 0; !flight_crash_written && waited < kCrashPatienceMs; ++waited) {
      const timespec millisecond{0, 1'000'000};
      ::nanosleep(&millisecond, nullptr);
    }
  }
  ::sigaction(signal, &flight_before[signal], nullptr);
  if (info->si_code <= 0) ::raise(signal);
  errno = error;
}

}  // namespace

FlightPlace FlightPlace::of(const std::string& out) {
  if (!out.empty()) return {out + "/" + kFlightFolder, true};
  if (const char* told = std::getenv(kFlightFolderVariable); told != nullptr && *told != '\0') {
    return {told, false};
  }
  std::random_device random;
  std::error_code problem;
  std::filesystem::path temporary = std::filesystem::temp_directory_path(problem);
  if (problem) temporary = "/tmp";
  return {temporary / fmt::format("lockstep-flight-{:08x}{:08x}", random(), random()), false};
}

FlightWatch::FlightWatch() {
  flight_asked = false;
  flight_bell = bell_.fd();
  thread_.start(
      "the flight recorder's thread", [this] { serve(); },
      [](const Error& error) { log(LogLevel::kWarning, "{}", error.what()); });
  const auto listen = [&](int signal, const struct sigaction& action) {
    before_.emplace_back(signal, action);
    ::sigaction(signal, &action, &before_.back().second);
    flight_before[signal] = before_.back().second;
  };
  struct sigaction ask {};
  ask.sa_flags = SA_RESTART;
  ask.sa_handler = on_ask;
  listen(SIGUSR2, ask);
  struct sigaction crash {};
  crash.sa_flags = SA_SIGINFO;
  crash.sa_sigaction = on_crash;
  for (const int signal : kCrashSignals) listen(signal, crash);
}

FlightWatch::~FlightWatch() {
  for (const auto& [signal, action] : before_) ::sigaction(signal, &action, nullptr);
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  bell_.set();
  thread_.join();
  flight_bell = -1;
}

void FlightWatch::add(const std::shared_ptr<FlightRecorder>& recorder, const std::string& out,
                      std::chrono::nanoseconds timeout) {
  const std::lock_guard lock(mutex_);
  if (place_.folder.empty() || out != out_) place_ = FlightPlace::of(out);
  out_ = out;
  watched_.push_back({recorder, place_, timeout});
  board_->add(recorder);
}

void FlightWatch::remove(const std::shared_ptr<FlightRecorder>& recorder) {
  const std::lock_guard lock(mutex_);
  std::erase_if(watched_, [&](const Watched& each) { return each.recorder == recorder; });
  board_->remove(*recorder);
}

const FlightWatch::Watched* FlightWatch::find(const FlightRecorder& recorder) const {
  const auto found = std::ranges::find_if(
      watched_, [&](const Watched& each) { return each.recorder.get() == &recorder; });
  return found == watched_.end() ? nullptr : &*found;
}

void FlightWatch::put_off(const Watched& watched, FlightFile file) {
  // A rank that stops now may be expelled a fifth of the timeout sooner than that: its last
  // heartbeat counts.
  pending_.push_back({watched.recorder, watched.place.folder, std::move(file),
                      Deadline::after(watched.timeout / 2)});
  bell_.set();
}

void FlightWatch::write(const std::shared_ptr<FlightRecorder>& recorder, const std::string& why) {
  FlightFile file = flight_file_of(recorder->snapshot(), why);
  const std::lock_guard lock(mutex_);
  const Watched* watched = find(*recorder);
  if (watched != nullptr && !closing_) put_off(*watched, std::move(file));
}

void FlightWatch::write_loss(const std::shared_ptr<FlightRecorder>& recorder, FlightFile file) {
  const std::lock_guard lock(mutex_);
  const Watched* watched = find(*recorder);
  if (watched != nullptr && watched->place.keeps && !closing_) put_off(*watched, std::move(file));
}

void FlightWatch::write_apart(const std::shared_ptr<FlightRecorder>& recorder,
                              const std::string& why) {
  const std::string folder = FlightPlace::of("").folder;
  {
    const std::lock_guard lock(mutex_);
    pending_.push_back({recorder, folder, flight_file_of(recorder->snapshot(), why)});
    bell_.set();
  }
  log(LogLevel::kInfo, "what this rank did last goes to {}", folder);
}

void FlightWatch::ask() {
  asked_ = true;
  bell_.set();
}

void FlightWatch::write_all(const std::string& why) {
  for (const auto& each : board_->all()) write(each, why);
}

bool FlightWatch::write_next() {
  Pending next;
  {
    const std::lock_guard lock(mutex_);
    if (pending_.empty()) return false;
    next = std::move(pending_.front());
    pending_.pop_front();
    writing_ = true;
  }
  bool done = false;
  try {
    write_flight_file(next.folder, next.file, disk(), [&](const std::string&) {
      if (!next.deadline.expired()) return;
      throw Error(ErrorCode::kTimeout,
                  "this process stood still, and the folder may be another job's by now");
    });
    next.recorder->set_written();
    done = true;
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, "what {} did last is not written: {}", next.file.name(), error.what());
  }
  const std::lock_guard lock(mutex_);
  writing_ = false;
  if (done) written_ = next.folder;
  return true;
}

void FlightWatch::serve() {
  for (;;) {
    pollfd polled{bell_.fd(), POLLIN, 0};
    ::poll(&polled, 1, -1);
    bell_.clear();
    const int crash = flight_crash;
    const bool crashed = crash != 0 && !flight_crash_written;
    const bool asked = flight_asked.exchange(false);
    const bool asked_by_job = asked_.exchange(false);
    if (crashed) {
      const std::string why = fmt::format("the process crashed with signal {}", crash);
      {
        const std::lock_guard lock(mutex_);
        // Which of several threads it was nobody knows.
        if (watched_.size() == 1) watched_[0].recorder->set_last_words(why);
      }
      write_all(why);
    } else if (asked) {
      write_all("SIGUSR2 asked for it");
      board_->ask_others();
    } else if (asked_by_job) {
      write_all("the job's centre asked for it");
    }
    while (write_next()) {
    }
    if (crashed) flight_crash_written = true;
    const std::lock_guard lock(mutex_);
    if (asked && !written_.empty()) {
      log(LogLevel::kInfo, "what this process did last is in {}; lockstep explain {}", written_,
          shell_word(written_));
    }
    if (closing_ && pending_.empty()) return;
  }
}

std::string FlightWatch::finish() {
  const Deadline deadline = Deadline::after(kWritePatience);
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if ((pending_.empty() && !writing_) || deadline.expired()) return written_;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace lockstep
