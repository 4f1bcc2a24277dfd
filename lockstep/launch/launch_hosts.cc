#include "lockstep/launch/launch_hosts.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/exit_code.h"
#include "lockstep/base/log.h"
#include "lockstep/base/signal_count.h"
#include "lockstep/base/text.h"
#include "lockstep/base/version.h"
#include "lockstep/launch/agent_message.h"
#include "lockstep/launch/blocked_signals.h"
#include "lockstep/launch/piped_process.h"
#include "lockstep/launch/rank_lines.h"
#include "lockstep/net/job/handshake.h"

namespace lockstep {
namespace {

constexpr int kNotExecutable = 126;
constexpr int kNotFound = 127;
constexpr std::string_view kClearsLine = "\r\x1b[K";
// Agents that were told to end have so long to do it, before their remote shells are killed.
constexpr std::chrono::seconds kEndGrace{3};

// 'it'\''s', for the shell of a host.
std::string shell_word(std::string_view word) {
  std::string text = "'";
  for (const char byte : word) text += byte == '\'' ? std::string("'\\''") : std::string(1, byte);
  return text + "'";
}

struct RunningHost {
  LaunchHost host;
  std::unique_ptr<PipedProcess> shell;
  RankLines lines;   // of its stderr; until it is ready, of whatever is there before the agent
  std::string said;  // on stdout, a line that has not ended
  bool ready = false;
  bool started = false;
  Deadline::Clock::time_point heard = Deadline::Clock::now();
  std::optional<ProcessEnd> train = std::nullopt;  // how `lockstep train` has ended there
  std::string trouble = {};                        // why it is lost, or was never of use
  bool gone = false;                               // the remote shell has ended

  // It came to an end of its own, in order or not.
  bool has_code() const { return train && !train->killed; }
};

class HostsLauncher {
 public:
  explicit HostsLauncher(const LaunchHostsOptions& options) : options_(options) {
    ::signal(SIGPIPE, SIG_IGN);  // remote shells may go at any time
    for (const LaunchHost& host : options_.hosts) workers_ += host.workers;
  }

  int run() {
    for (const LaunchHost& host : options_.hosts) connect(host);
    while (std::ranges::any_of(hosts_, [](const RunningHost& host) { return !host.gone; })) {
      wait();
      give_orders();
      if (end_at_ && end_at_->expired()) {
        for (RunningHost& host : hosts_) host.shell->signal(SIGKILL);
      }
    }
    return conclude();
  }

 private:
  void connect(const LaunchHost& host) {
    PipedProcess::Options options;
    options.words = options_.shell;
    options.words.push_back(host.name);
    options.words.push_back(fmt::format("exec {} agent", shell_word(options_.program)));
    options.signals = signals_.before();
    options.own_group = true;
    RunningHost running{.host = host,
                        .shell = std::make_unique<PipedProcess>(std::move(options)),
                        .lines = RankLines(fmt::format("[{}] ", host.name)),
                        .said = {}};
    running.lines.set_foreign(true);
    send(running, {"timeout", std::to_string(options_.timeout.count())});  // it beats from now on
    hosts_.push_back(std::move(running));
  }

  // Until something happens, at most for a beat.
  void wait() {
    std::vector<pollfd> polled = {{signals_.fd(), POLLIN, 0}};
    for (const RunningHost& host : hosts_) {
      polled.push_back({host.shell->output(), POLLIN, 0});
      polled.push_back({host.shell->messages(), POLLIN, 0});
      polled.push_back({host.shell->waiting_input(), POLLOUT, 0});
    }
    const auto beat = std::chrono::milliseconds(options_.timeout / 4).count();
    ::poll(polled.data(), polled.size(), static_cast<int>(std::clamp<std::int64_t>(beat, 10, 250)));
    const auto now = Deadline::Clock::now();
    if (now >= next_beat_) {
      for (RunningHost& host : hosts_) send(host, {"beat"});
      next_beat_ = now + options_.timeout / 4;
    }
    for (RunningHost& host : hosts_) {
      host.shell->write("");
      host.heard = excuse_own_pause(host.heard, looked_, now, options_.timeout);
      listen_to(host);
    }
    looked_ = now;
    while (const auto signal = signals_.next()) take(static_cast<int>(signal->ssi_signo));
    for (RunningHost& host : hosts_) look_after(host);
  }

  static void send(RunningHost& host, const AgentMessage& message) {
    host.shell->write(encode(message));
  }

  void listen_to(RunningHost& host) {
    if (std::string text = host.shell->read_messages(); !text.empty()) {
      show(host, host.lines.take(text));
    }
    const std::string text = host.shell->read_output();
    if (!text.empty()) host.heard = Deadline::Clock::now();
    host.said += text;
    for (std::size_t end = host.said.find('\n'); end != std::string::npos;
         end = host.said.find('\n')) {
      const std::string line = host.said.substr(0, end);
      host.said.erase(0, end + 1);
      if (const auto message = decode_agent_message(line)) {
        hear(host, *message);
      } else if (host.ready) {
        print_text(line + "\n");
      } else {
        // A greeting of the shell's: from outside, and no bar of ours.
        show(host, fmt::format("[{}] {}\n", host.host.name, visible(line)));
      }
    }
  }

  void show(const RunningHost& host, std::string text) {
    if (text.empty()) return;
    // Another host's bar would share the line; it is drawn again soon.
    const bool bar = std::ranges::any_of(hosts_, [&](const RunningHost& other) {
      return &other != &host && other.lines.bar_is_open();
    });
    if (bar) text.insert(0, kClearsLine);
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
  }

  void hear(RunningHost& host, const AgentMessage& message) {
    const std::string word = message.size() > 1 ? message[1] : "";
    if (message[0] == "ready") {
      host.ready = true;
      show(host, host.lines.end());  // what the shell has begun is not the agent's
      host.lines.set_foreign(false);
      if (word == version()) return;
      trouble(host, fmt::format("has lockstep {} at {}, and this is {}", word, options_.program,
                                version()));
    } else if (message[0] == "listening") {
      address_ = word;
    } else if (message[0] == "formed") {
      formed_ = true;
    } else if (message[0] == "refused") {
      trouble(host, word);
      usage_ = true;
    } else if (message[0] == "ended" || message[0] == "killed") {
      // Whatever says no number has not ended well.
      host.train = ProcessEnd{message[0] == "killed", number_at(message, 1).value_or(kExitFailed)};
    }
  }

  // First all agents are there, then the first host starts the job, then the others join it.
  void give_orders() {
    if (end_at_ || stopped_by_ != 0) return;
    if (!std::ranges::all_of(hosts_, &RunningHost::ready)) return;
    for (RunningHost& host : hosts_) {
      const bool first = &host == &hosts_.front();
      if (host.started || (!first && address_.empty())) continue;
      host.started = true;
      send(host, {"token", token_});
      send(host, {"folder", options_.folder});
      send(host, {"name", name_on_network(host.host)});
      for (const std::string& variable : options_.variables) send(host, {"variable", variable});
      for (const std::string& argument : options_.arguments) send(host, {"argument", argument});
      const std::string workers = std::to_string(host.host.workers);
      if (first) {
        send(host, {"listen", workers, std::to_string(workers_), options_.log});
      } else {
        send(host, {"join", workers, address_, options_.log});
      }
    }
  }

  void take(int signal) {
    if (signal == SIGCHLD) return;
    const auto running = std::ranges::find_if(
        hosts_, [](const RunningHost& host) { return host.started && !host.train && !host.gone; });
    const auto pass_on = [&](int number) {
      if (running != hosts_.end()) send(*running, {"signal", std::to_string(number)});
    };
    if (signal == SIGUSR1 || signal == SIGUSR2) return pass_on(signal);
    switch (stop_signals_.take(signal, std::chrono::steady_clock::now())) {
      case SignalCount::Meaning::kSameAgain: return;
      case SignalCount::Meaning::kSecond: return end_all();
      case SignalCount::Meaning::kFirst: break;
    }
    stopped_by_ = signal;
    if (!formed_) return end_all();  // there is nothing to save
    // One host tells all others. Where the job was started any signal stops it; to a host that has
    // joined only SIGINT means all.
    pass_on(running == hosts_.begin() ? signal : SIGINT);
  }

  // What has become of a host, and what follows.
  void look_after(RunningHost& host) {
    if (host.gone) return;
    const auto now = Deadline::Clock::now();
    if (const auto end = host.shell->end()) {
      listen_to(host);
      show(host, host.lines.end());
      host.gone = true;
      if (!host.train && host.trouble.empty() && !end_at_) host.trouble = trouble_of(host, *end);
      if (host.train && host.train->killed) {
        host.trouble = fmt::format("its lockstep train {}", to_string(*host.train));
      }
      return judge(host);
    }
    if (now - host.heard <= options_.timeout || !host.trouble.empty()) return;
    const std::string limit = format_duration(options_.timeout);
    host.trouble = host.ready
                       ? fmt::format("was silent for {}", limit)
                       : fmt::format("did not answer {} within {}", options_.shell[0], limit);
    host.shell->signal(SIGKILL);
  }

  // Of a remote shell that has ended without a word of the agent's about `lockstep train`.
  std::string trouble_of(const RunningHost& host, const ProcessEnd& end) const {
    const bool code = !end.killed && !host.ready;
    if (code && (end.number == kNotFound || end.number == kNotExecutable)) {
      const bool local = host.lines.last_line().empty();
      if (local && end.number == kNotFound) {
        return fmt::format("cannot be reached: there is no program {} here", options_.shell[0]);
      }
      return fmt::format("has no program {} that can be run (--program names another)",
                         options_.program);
    }
    const std::string last = host.lines.last_line();
    return fmt::format("{}: {} {}{}", host.ready ? "is lost" : "cannot be used", options_.shell[0],
                       to_string(end), last.empty() ? "" : fmt::format(": {}", last));
  }

  void trouble(RunningHost& host, std::string text) {
    host.trouble = std::move(text);
    if (!formed_) blame(host);
  }

  // A host has ended, somehow.
  void judge(RunningHost& host) {
    if (stopped_by_ != 0 || end_at_) return;
    const bool well = host.train && !host.train->killed && host.train->number == 0;
    if (!formed_ && (!well || &host != &hosts_.front())) return blame(host);
    if (host.has_code()) {
      if (!well && &host != &hosts_.front() && !hosts_.front().gone) {
        log(LogLevel::kWarning, "host {} {}", host.host.name, to_string(*host.train));
      }
      return;
    }
    log(LogLevel::kWarning, "host {} {}; the others go on", host.host.name, host.trouble);
  }

  // The launch ends by it.
  void blame(RunningHost& host) {
    if (!culprit_) culprit_ = static_cast<std::size_t>(&host - hosts_.data());
    end_all();
  }

  void end_all() {
    for (RunningHost& host : hosts_) {
      send(host, {"kill"});
      host.shell->close_input();
      // One that has not answered yet has nothing to end.
      if (!host.ready) host.shell->signal(SIGKILL);
    }
    if (!end_at_) end_at_ = Deadline::after(kEndGrace);
  }

  int conclude() const {
    if (culprit_) {
      const RunningHost& host = hosts_[*culprit_];
      if (!host.trouble.empty()) {
        log(LogLevel::kError, "host {} {}", host.host.name, host.trouble);
        return usage_ ? 2 : 1;
      }
      return tell_failed(host);
    }
    if (stopped_by_ != 0) return 128 + stopped_by_;
    const RunningHost& first = hosts_.front();
    if (first.has_code()) return first.train->number == 0 ? 0 : tell_failed(first);
    // The others have gone on without it.
    const auto came_to_the_end = std::ranges::find_if(
        hosts_, [](const RunningHost& host) { return host.has_code() && host.train->number == 0; });
    if (came_to_the_end != hosts_.end()) return 0;
    const auto failed = std::ranges::find_if(hosts_, &RunningHost::has_code);
    if (failed != hosts_.end()) return tell_failed(*failed);
    log(LogLevel::kError, "all hosts are lost; the first of them, {}, {}", first.host.name,
        first.trouble);
    return 1;
  }

  static int tell_failed(const RunningHost& host) {
    std::string_view last = host.lines.last_line();
    constexpr std::string_view kError = "error: ";
    if (last.starts_with(kError)) last.remove_prefix(kError.size());
    const int code = host.train->number;
    if (code >= 128) return code;  // stopped there, in order
    log(LogLevel::kError, "host {} failed, with exit code {}{}{}", host.host.name, code,
        last.empty() ? "" : ": ", last);
    return code;
  }

  const LaunchHostsOptions options_;
  const BlockedSignals signals_;
  const std::string token_ = random_secret();
  int workers_ = 0;
  std::vector<RunningHost> hosts_;
  std::string address_;  // where the job can be joined
  bool formed_ = false;  // all have joined it
  bool usage_ = false;   // a host has refused what it was told
  int stopped_by_ = 0;
  SignalCount stop_signals_;
  std::optional<std::size_t> culprit_;  // by whom the launch ends
  std::optional<Deadline> end_at_;      // for those who were told to end at once
  Deadline::Clock::time_point looked_ = Deadline::Clock::now();
  Deadline::Clock::time_point next_beat_ = looked_;
};

}  // namespace

int launch_hosts(const LaunchHostsOptions& options) { return HostsLauncher(options).run(); }

}  // namespace lockstep
