#include "lockstep/launch/host_agent.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/descriptor.h"
#include "lockstep/base/error.h"
#include "lockstep/base/exit_code.h"
#include "lockstep/base/log.h"
#include "lockstep/base/version.h"
#include "lockstep/launch/agent_message.h"
#include "lockstep/launch/blocked_signals.h"
#include "lockstep/launch/memory_file.h"
#include "lockstep/launch/piped_process.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/net/socket/address.h"

namespace lockstep {
namespace {

// Until the launcher has told its own.
constexpr std::chrono::milliseconds kFirstTimeout{60'000};

// The address of this host by which the remote shell has come; if there is none that others could
// use, one of the name that the launcher has for us. Empty if there is none either.
std::string own_address(const std::string& name, Deadline deadline) {
  if (const char* connection = std::getenv("SSH_CONNECTION")) {
    // client, its port, this host, its port
    std::string_view text(connection);
    for (int i = 0; i < 2; ++i) text.remove_prefix(std::min(text.find(' ') + 1, text.size()));
    const HostPort where = {std::string(text.substr(0, text.find(' '))), 0};
    const auto address = SocketAddress::parse(to_string(where));
    if (address && !address->is_loopback()) return address->host();
  }
  try {
    for (const SocketAddress& address : resolve({name, 0}, deadline)) {
      if (!address.is_loopback()) return address.host();
    }
  } catch (const Error&) {  // a name that only the remote shell knows
  }
  return "";
}

class HostAgent {
 public:
  explicit HostAgent(const HostCommandFor& command_for) : command_for_(command_for) {}

  int run() {
    ::signal(SIGPIPE, SIG_IGN);  // the launcher may go at any time
    for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
      ::fcntl(stream, F_SETFL, ::fcntl(stream, F_GETFL) | O_NONBLOCK);
    }
    tell({"ready", std::string(version())});
    while (!child_) {
      wait();
      if (refused_) return drained(kExitUsage);
      if (!launcher_lives_) return kExitFailed;
    }
    while (!child_->end()) {
      wait();
      if (end_at_ && end_at_->expired()) child_->signal(SIGKILL);
    }
    pass_on();
    if (!said_.empty()) output_ += std::exchange(said_, {}) + "\n";  // a line that never ended
    const ProcessEnd end = *child_->end();
    tell({end.killed ? "killed" : "ended", std::to_string(end.number)});
    return drained(end.killed ? kExitFailed : end.number);
  }

 private:
  // Until something happens, at most for a beat.
  void wait() {
    std::vector<pollfd> polled = {{signals_.fd(), POLLIN, 0},
                                  {launcher_lives_ ? STDIN_FILENO : -1, POLLIN, 0},
                                  {output_.empty() ? -1 : STDOUT_FILENO, POLLOUT, 0},
                                  {errors_.empty() ? -1 : STDERR_FILENO, POLLOUT, 0},
                                  {status_.get(), POLLIN, 0}};
    if (child_) {
      polled.push_back({child_->output(), POLLIN, 0});
      polled.push_back({child_->messages(), POLLIN, 0});
    }
    const int beat = static_cast<int>(std::chrono::milliseconds(timeout_ / 4).count());
    ::poll(polled.data(), polled.size(), std::clamp(beat, 10, 1000));
    const auto now = Deadline::Clock::now();
    heard_ = excuse_own_pause(heard_, looked_, now, timeout_);
    looked_ = now;
    if (now >= next_beat_) {
      tell({"beat"});
      next_beat_ = now + timeout_ / 4;
    }
    read_orders();
    if (launcher_lives_ && now - heard_ > timeout_) lose_launcher();
    while (const auto signal = signals_.next()) {
      if (signal->ssi_signo == SIGCHLD) continue;
      if (child_) child_->signal(static_cast<int>(signal->ssi_signo));
      if (!child_) lose_launcher();  // somebody wants us to go
    }
    pass_on();
  }

  void lose_launcher() {
    if (!std::exchange(launcher_lives_, false)) return;
    if (!child_) return;
    child_->signal(SIGTERM);
    end_at_ = Deadline::after(timeout_);
  }

  void read_orders() {
    std::array<char, 4096> bytes{};
    while (launcher_lives_) {
      const ssize_t count = ::read(STDIN_FILENO, bytes.data(), bytes.size());
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) break;
      if (count <= 0) return lose_launcher();
      heard_ = Deadline::Clock::now();
      orders_.append(bytes.data(), static_cast<std::size_t>(count));
      for (std::size_t end = orders_.find('\n'); end != std::string::npos;
           end = orders_.find('\n')) {
        const auto message = decode_agent_message(std::string_view(orders_).substr(0, end));
        orders_.erase(0, end + 1);
        if (message) obey(*message);
      }
    }
  }

  void obey(const AgentMessage& message) {
    try {
      follow(message);
    } catch (const std::exception& error) {
      const auto* own = dynamic_cast<const Error*>(&error);
      tell({"refused", own != nullptr ? std::string(own->message()) : error.what()});
      refused_ = true;
    }
  }

  void follow(const AgentMessage& message) {
    const std::string& what = message[0];
    const auto word = [&](std::size_t i) { return i < message.size() ? message[i] : ""; };
    const auto number = [&](std::size_t i) {
      if (const auto found = number_at(message, i)) return *found;
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("the launcher said {} '{}', which is no number", what, word(i)));
    };
    if (what == "token") token_ = word(1);
    if (what == "folder") folder_ = word(1);
    if (what == "name") name_ = word(1);
    if (what == "timeout") {
      timeout_ = std::chrono::milliseconds(std::max(number(1), 40));
      next_beat_ = Deadline::Clock::now();
    }
    if (what == "variable") variables_.push_back(word(1));
    if (what == "argument") order_.arguments.push_back(word(1));
    if (what == "signal" && child_) child_->signal(number(1));
    if (what == "kill") {
      launcher_lives_ = false;
      if (child_) child_->signal(SIGKILL);
    }
    if (what != "listen" && what != "join") return;
    order_.joins = what == "join";
    order_.workers = number(1);
    if (order_.joins) {
      order_.address = word(2);
    } else {
      order_.expect = number(2);
    }
    order_.log = word(3);
    start();
  }

  void start() {
    if (!folder_.empty() && ::chdir(folder_.c_str()) != 0) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("the folder {}: {} (--chdir names another)", folder_, std::strerror(errno)));
    }
    std::string found;
    if (!order_.joins) {
      found = own_address(name_, Deadline::after(timeout_ / 2));
      const bool alone = order_.expect == order_.workers;
      order_.address = to_string(HostPort{found.empty() && alone ? "127.0.0.1" : found, 0});
    }
    const HostCommand command = command_for_(order_);
    if (const auto listen = parse_host_port(command.listen)) {
      const auto bound = SocketAddress::parse(command.listen);
      reached_ = bound && bound->is_any() ? found : listen->host;
    }
    if (!order_.joins && reached_.empty()) {
      throw Error(ErrorCode::kInvalidArgument,
                  "no address is known here that other hosts could reach; behind `train`, "
                  "--listen HOST:PORT names one");
    }
    const Descriptor token = memory_file("lockstep-token", token_);
    std::array<int, 2> status{};
    if (::pipe2(status.data(), O_CLOEXEC) != 0) throw_io("pipe", errno);
    status_ = Descriptor(status[0]);
    const Descriptor status_end(status[1]);
    ::fcntl(status[0], F_SETFL, O_NONBLOCK);
    PipedProcess::Options options;
    options.words = command.arguments;
    options.words.insert(options.words.begin(), "/proc/self/exe");
    options.variables = variables_;
    options.variables.push_back(fmt::format("{}={}", kTokenFileVariable, token.get()));
    options.variables.push_back(fmt::format("{}={}", kStatusVariable, status_end.get()));
    options.descriptors = {token.get(), status_end.get()};
    options.signals = signals_.before();
    options.reads = false;
    child_ = std::make_unique<PipedProcess>(std::move(options));
  }

  // What the child prints, and what its launcher of ranks tells.
  void pass_on() {
    if (child_) {
      errors_ += child_->read_messages();
      said_ += child_->read_output();
      if (const std::size_t lines = said_.rfind('\n'); lines != std::string::npos) {
        output_ += said_.substr(0, lines + 1);
        said_.erase(0, lines + 1);
      }
    }
    std::array<char, 256> bytes{};
    while (status_) {
      const ssize_t count = ::read(status_.get(), bytes.data(), bytes.size());
      if (count < 0) break;
      if (count == 0) status_.reset();
      told_.append(bytes.data(), static_cast<std::size_t>(count));
    }
    for (std::size_t end = told_.find('\n'); end != std::string::npos; end = told_.find('\n')) {
      const std::string line = told_.substr(0, end);
      told_.erase(0, end + 1);
      const auto port = static_cast<std::uint16_t>(std::atoi(line.c_str()));
      if (port == 0) {
        tell({line});
      } else {
        tell({"listening", to_string(HostPort{reached_, port})});
      }
    }
    flush(STDOUT_FILENO, output_);
    flush(STDERR_FILENO, errors_);
  }

  void tell(const AgentMessage& message) {
    output_ += encode(message);
    flush(STDOUT_FILENO, output_);
  }

  // What the launcher cannot take now waits; what it will never take goes.
  void flush(int stream, std::string& bytes) {
    while (!bytes.empty()) {
      const ssize_t count = ::write(stream, bytes.data(), bytes.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0 && errno == EAGAIN && launcher_lives_) return;
      bytes.erase(0, count < 0 ? bytes.size() : static_cast<std::size_t>(count));
    }
  }

  // The last words have a short time to leave.
  int drained(int code) {
    const Deadline soon = Deadline::after(timeout_);
    while (launcher_lives_ && !(output_.empty() && errors_.empty()) && !soon.expired()) wait();
    return code;
  }

  const HostCommandFor& command_for_;
  const BlockedSignals signals_;
  HostOrder order_;
  std::string token_, folder_, name_;
  std::vector<std::string> variables_;
  std::chrono::milliseconds timeout_ = kFirstTimeout;
  std::string reached_;  // this host, as others reach it
  std::unique_ptr<PipedProcess> child_;
  Descriptor status_;
  std::string orders_;           // of which the last line has not ended
  std::string said_;             // likewise, by the child
  std::string told_;             // likewise, by the launcher of ranks
  std::string output_, errors_;  // not written yet
  bool launcher_lives_ = true;
  bool refused_ = false;
  Deadline::Clock::time_point heard_ = Deadline::Clock::now();
  Deadline::Clock::time_point looked_ = heard_;
  Deadline::Clock::time_point next_beat_ = heard_;
  std::optional<Deadline> end_at_;
};

}  // namespace

int run_host_agent(const HostCommandFor& command_for) { return HostAgent(command_for).run(); }

}  // namespace lockstep
