#include "lockstep/run/signals.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>

#include "lockstep/base/signal_count.h"

namespace lockstep {
namespace {

constinit SignalCount stop_signals;
constinit std::atomic<bool> save_requested{false};
constinit std::atomic<bool> telling{false};
constinit std::atomic<bool> term_leaves{false};
constinit std::atomic<bool> run_began{false};
constinit std::atomic<int> code_before_entering{-1};  // -1: this process is no newcomer

// Two texts in turn: a handler may be reading the one before.
using PathText = std::array<char, 4096>;
constinit std::array<PathText, 2> checkpoint_paths{};
constinit std::atomic<int> newest_path{-1};

// As a handler may.
void say(const char* text) {
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, std::strlen(text));
}

bool leaves(int signal) { return signal == SIGTERM && term_leaves; }

// nohup has a run go on without its terminal, and a launcher stops its ranks in another way.
bool is_ignored(int signal) {
  struct sigaction now {};
  return ::sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

void end_by(int signal) {
  std::signal(signal, SIG_DFL);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, signal);
  ::pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  std::raise(signal);
  ::_exit(128 + signal);  // only process 1 of a container comes here: the kernel spares it
}

void on_stop(int signal) {
  const int error = errno;
  switch (stop_signals.take(signal, std::chrono::steady_clock::now())) {
    case SignalCount::Meaning::kFirst:
      if (telling && ::isatty(STDERR_FILENO) != 0) say("\n");  // a bar may be there
      if (!run_began && code_before_entering >= 0 && leaves(signal)) {
        if (telling) say("left before this worker was needed\n");
        ::_exit(code_before_entering);
      } else if (!run_began) {
        if (telling) say("stopped before the run began\n");
        end_by(signal);
      } else if (telling) {
        say(leaves(signal) ? "leaving" : "stopping");
        say(" after the step under way; press Ctrl-C again to end at once\n");
      }
      break;
    case SignalCount::Meaning::kSameAgain: break;
    case SignalCount::Meaning::kSecond:
      if (telling) {
        const int newest = newest_path.load();
        say("\nended at once; ");
        say(newest < 0 ? "no checkpoint was saved" : "the newest checkpoint is ");
        if (newest >= 0) say(checkpoint_paths[static_cast<std::size_t>(newest)].data());
        say("\n");
      }
      end_by(signal);
      break;
  }
  errno = error;
}

}  // namespace

void listen_to_signals(bool tell, TermMeaning term) {
  telling = tell;
  term_leaves = term == TermMeaning::kLeave;
  struct sigaction action {};
  action.sa_flags = SA_RESTART;
  action.sa_handler = on_stop;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  if (!is_ignored(SIGHUP)) ::sigaction(SIGHUP, &action, nullptr);
  action.sa_handler = [](int) { save_requested.store(true); };
  ::sigaction(SIGUSR1, &action, nullptr);
}

void note_waits_to_enter(int code) { code_before_entering = code; }
void note_run_begins() { run_began = true; }

int leave_request(std::optional<std::chrono::steady_clock::time_point> asked,
                  std::chrono::steady_clock::time_point now) {
  if (!asked) return 0;
  return now - *asked < std::chrono::seconds(1) ? 1 : 2;
}

Requests requests_of_signals() {
  Requests wanted;
  wanted.save = save_requested.exchange(false);
  const int signal = stop_signals.first();
  if (leaves(signal)) {
    wanted.leave = leave_request(stop_signals.first_time(), std::chrono::steady_clock::now());
  } else {
    wanted.stop = signal;
  }
  return wanted;
}

void note_checkpoint(const std::string& path) {
  const int next = newest_path.load() == 0 ? 1 : 0;
  PathText& text = checkpoint_paths[static_cast<std::size_t>(next)];
  const std::size_t size = std::min(path.size(), text.size() - 1);
  std::copy_n(path.data(), size, text.data());
  text[size] = '\0';
  newest_path.store(next);
}

}  // namespace lockstep
