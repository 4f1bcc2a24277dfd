#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/options.h"
#include "lockstep/base/descriptor.h"
#include "lockstep/base/error.h"
#include "lockstep/base/exit_code.h"
#include "lockstep/base/host.h"
#include "lockstep/base/index.h"
#include "lockstep/base/text.h"
#include "lockstep/doctor/host_checks.h"
#include "lockstep/doctor/link_checks.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/net/socket/interface.h"

extern char** environ;

namespace lockstep::cli {
namespace {

constexpr const char* kDoctorExplanation =
    R"(Looks at a host, or at several and the network between them, before a run does: version, processor,
cores, memory, /dev/shm, open files, the disk's sync rate, GPU, driver and NCCL, clock, name, interfaces,
port and token. Between hosts every process calls every other one, in both directions, and measures the
way: a pair that a firewall or a missing route keeps apart is named.

  lockstep doctor                                  this host
  lockstep doctor --workers 8 --out /data/run      what it would take for a run
  lockstep doctor --hosts b,c                      this host, b and c; started there over ssh
  torchrun ... lockstep doctor                     under a launcher: all its processes
                                                   (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, or
                                                   what mpirun and srun set); rank 0 prints

Exit codes: 0 all is good, 5 warnings, 1 something will fail, 2 wrong usage.)";
constexpr std::size_t kWidestFound = 76;

struct DoctorFlags {
  HostCheckOptions host;
  std::string hosts;
  std::string ssh = "ssh -o BatchMode=yes -o ConnectTimeout=10";
  std::string remote = "lockstep";
  std::string address;
  std::string member;  // "RANK/SIZE ADDRESS:PORT", for those that we start ourselves
  double timeout = 20;
  bool json = false;
};

std::vector<std::string> words_of(const std::string& text, char separator) {
  std::vector<std::string> words;
  std::istringstream stream(text);
  for (std::string word; std::getline(stream, word, separator);) {
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

// A doctor on another host. Ends with this object.
class RemoteDoctor {
 public:
  RemoteDoctor(std::string host, std::vector<std::string> command, const std::string& secret)
      : host_(std::move(host)) {
    std::array<int, 2> pipe{};
    if (::pipe2(pipe.data(), O_CLOEXEC) != 0) throw_io("pipe", errno);
    const Descriptor read_end(pipe[0]);
    const Descriptor write_end(pipe[1]);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, read_end.get(), STDIN_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
    std::vector<char*> arguments;
    for (std::string& word : command) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    const int problem =
        ::posix_spawnp(&pid_, arguments[0], &actions, nullptr, arguments.data(), environ);
    ::posix_spawn_file_actions_destroy(&actions);
    if (problem != 0) throw_io("starting " + command[0], problem);
    // Not on its command line, which others can read.
    const std::string line = secret + "\n";
    [[maybe_unused]] const ssize_t written = ::write(write_end.get(), line.data(), line.size());
  }
  ~RemoteDoctor() {
    if (pid_ <= 0 || gone()) return;
    ::kill(pid_, SIGTERM);
    ::waitpid(pid_, nullptr, 0);
  }
  RemoteDoctor(const RemoteDoctor&) = delete;
  RemoteDoctor& operator=(const RemoteDoctor&) = delete;

  // Why it will not come, once it has ended.
  std::optional<std::string> gone() {
    if (!why_gone_ && ::waitpid(pid_, &status_, WNOHANG) == pid_) {
      why_gone_ =
          WIFEXITED(status_)
              ? fmt::format("{} could not be asked: exit code {}", host_, WEXITSTATUS(status_))
              : fmt::format("{} could not be asked: signal {}", host_, WTERMSIG(status_));
    }
    return why_gone_;
  }

 private:
  const std::string host_;
  pid_t pid_ = -1;
  int status_ = 0;
  std::optional<std::string> why_gone_;
};

// As text: a line for each finding, what to do below those that are not good.
void print_table(const std::vector<Finding>& findings) {
  std::size_t host = 4;
  std::size_t check = 5;
  for (const Finding& each : findings) {
    host = std::max(host, each.host.size());
    check = std::max(check, each.check.size());
  }
  fmt::print("{:<{}}  {:<{}}  {:<7}  {}\n", "HOST", host, "CHECK", check, "VERDICT", "FOUND");
  for (const Finding& each : findings) {
    std::string found = visible(each.found);  // other hosts tell of themselves
    if (each.verdict == Verdict::kGood && found.size() > kWidestFound) {
      found = found.substr(0, kWidestFound - 3) + "...";
    }
    fmt::print("{:<{}}  {:<{}}  {:<7}  {}\n", visible(each.host), host, visible(each.check), check,
               to_string(each.verdict), found);
    if (!each.advice.empty())
      fmt::print("{:{}}  -> {}\n", "", host + check + 11, visible(each.advice));
  }
}

int exit_code_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kGood: return 0;
    case Verdict::kWarning: return kExitWarnings;
    case Verdict::kBad: return kExitFailed;
  }
  return kExitFailed;
}

int report(const LinkChecks& checks, bool as_json) {
  const Verdict verdict = worst(checks.findings);
  const int code = exit_code_of(verdict);
  if (!as_json) {
    print_table(checks.findings);
    const auto count = [&](Verdict which) {
      return std::ranges::count(checks.findings, which, &Finding::verdict);
    };
    const auto warnings = count(Verdict::kWarning);
    fmt::print("{}: {} good, {} warning{}, {} bad\n", to_string(verdict), count(Verdict::kGood),
               warnings, warnings == 1 ? "" : "s", count(Verdict::kBad));
    return code;
  }
  nlohmann::ordered_json findings = nlohmann::ordered_json::array();
  for (const Finding& each : checks.findings) {
    findings.push_back({{"host", each.host},
                        {"check", each.check},
                        {"verdict", to_string(each.verdict)},
                        {"found", each.found},
                        {"advice", each.advice}});
  }
  nlohmann::ordered_json links = nlohmann::ordered_json::array();
  for (const LinkReport& each : checks.links) {
    links.push_back({{"from", checks.labels[index_of(each.from)]},
                     {"to", checks.labels[index_of(each.to)]},
                     {"address", each.address},
                     {"works", each.error.empty()},
                     {"error", each.error},
                     {"round_trip_us", each.round_trip * 1e6},
                     {"bytes_per_second", each.bytes_per_second},
                     {"clock_ahead_s", each.clock_ahead}});
  }
  const nlohmann::ordered_json all = {{"verdict", to_string(verdict)},
                                      {"exit_code", code},
                                      {"findings", std::move(findings)},
                                      {"links", std::move(links)}};
  fmt::print("{}\n", all.dump(2));
  return code;
}

std::string label_of(int rank, int world_size) {
  const std::string host = this_host().hostname;
  return world_size == 1 ? host : fmt::format("{} (rank {})", host, rank);
}

// "b" of "me@b".
std::string host_name_of(const std::string& destination) {
  return destination.substr(destination.find('@') + 1);
}

// The address by which the others reach this host: that of its name, or, where the name leads to
// loopback as on a fresh Debian, the one from which this host reaches the first of them.
std::string own_address(const DoctorFlags& flags, const std::string& first) {
  if (!flags.address.empty()) return flags.address;
  if (!flags.host.interface.empty()) {
    return interface_address(flags.host.interface, AF_INET).host();
  }
  const auto addresses_of = [](const std::string& name) -> std::vector<SocketAddress> {
    try {
      return resolve({name, 1}, Deadline::after(std::chrono::seconds(3)));
    } catch (const Error&) {  // it has none
      return {};
    }
  };
  for (const SocketAddress& each : addresses_of(this_host().hostname)) {
    if (!each.is_loopback()) return each.host();
  }
  for (const SocketAddress& each : addresses_of(host_name_of(first))) {
    try {
      const SocketAddress own = local_address_toward(each);
      if (!own.is_loopback()) return own.host();
    } catch (const Error&) {  // no route
    }
  }
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("this host's name leads to loopback only, and no route to {} is known: "
                          "--address says how others reach it",
                          first));
}

LinkCheckOptions place_of(DoctorFlags& flags, int rank, int world_size) {
  LinkCheckOptions place;
  place.rank = rank;
  place.world_size = world_size;
  place.port = flags.host.port;
  place.timeout = duration_of(flags.timeout);
  place.label = flags.host.host = label_of(rank, world_size);
  flags.host.several_hosts = world_size > 1;
  return place;
}

int run_here(DoctorFlags& flags) {
  place_of(flags, 0, 1);
  LinkChecks checks;
  checks.findings = check_host(flags.host);
  return report(checks, flags.json);
}

// Under a launcher.
int run_as_rank(DoctorFlags& flags, const RankEnvironment& environment) {
  LinkCheckOptions place = place_of(flags, environment.rank, environment.world_size);
  place.secret = flags.host.token;  // so all that come have the same
  place.hub = {environment.master_host, environment.master_port};
  if (environment.listener) place.listener = Socket(Descriptor(*environment.listener), "the hub");
  place.findings = check_host(flags.host);
  const LinkChecks checks = check_links(std::move(place));
  return environment.rank == 0 ? report(checks, flags.json) : 0;
}

// One of those that run_on_hosts() has started.
int run_as_member(DoctorFlags& flags) {
  int rank = 0;
  int world_size = 0;
  std::string where;
  char slash = 0;
  std::istringstream text(flags.member);
  const bool read = static_cast<bool>(text >> rank >> slash >> world_size >> slash >> where);
  const auto hub = read ? parse_host_port(where) : std::nullopt;
  // The doctor's own: that of the job need not be right, or there.
  std::string secret;
  if (!hub || rank < 1 || rank >= world_size || !std::getline(std::cin, secret)) {
    throw Error(ErrorCode::kInvalidArgument, "--member is for processes that the doctor starts");
  }
  try {
    flags.host.token = token_from(flags.host.token_file);
  } catch (const Error& error) {
    flags.host.no_token = error.message();
  }
  flags.host.over_ssh = true;
  LinkCheckOptions place = place_of(flags, rank, world_size);
  place.secret = secret;
  place.token = flags.host.token;
  place.hub = *hub;
  place.findings = check_host(flags.host);
  check_links(std::move(place));
  return 0;
}

int run_on_hosts(DoctorFlags& flags) {
  const std::vector<std::string> hosts = words_of(flags.hosts, ',');
  if (hosts.empty()) throw Error(ErrorCode::kInvalidArgument, "--hosts: there is no name in it");
  const int world_size = static_cast<int>(hosts.size()) + 1;
  LinkCheckOptions place = place_of(flags, 0, world_size);
  place.secret = random_secret();
  place.token = flags.host.token;
  const std::string address = own_address(flags, hosts.front());
  const bool v6 = address.find(':') != std::string::npos;
  Socket listener = listen_tcp(SocketAddress::any(v6 ? AF_INET6 : AF_INET));
  place.hub = {address, listener.local_address().port()};
  place.listener = std::move(listener);
  std::vector<std::unique_ptr<RemoteDoctor>> remote;
  for (int rank = 1; rank < world_size; ++rank) {
    const std::string& host = hosts[index_of(rank - 1)];
    std::vector<std::string> command = words_of(flags.ssh, ' ');
    command.push_back(host);
    for (const std::string& word : words_of(flags.remote, ' ')) command.push_back(word);
    command.insert(command.end(), {"doctor", "--member",
                                   fmt::format("{}/{}/{}", rank, world_size, to_string(place.hub)),
                                   "--workers", std::to_string(flags.host.workers)});
    // Not --port: only this host listens there, and the others try whether they reach it.
    for (const auto& [option, value] :
         {std::pair("--out", flags.host.folder), std::pair("--interface", flags.host.interface),
          std::pair("--token-file", flags.host.token_file)}) {
      if (!value.empty()) command.insert(command.end(), {option, value});
    }
    remote.push_back(std::make_unique<RemoteDoctor>(host, std::move(command), place.secret));
  }
  place.gone = [&](int rank) { return remote[index_of(rank - 1)]->gone(); };
  place.findings = check_host(flags.host);
  return report(check_links(std::move(place)), flags.json);
}

int run_doctor(DoctorFlags& flags) {
  if (!flags.member.empty()) return run_as_member(flags);
  flags.host.token = token_from(flags.host.token_file);
  if (!flags.hosts.empty()) return run_on_hosts(flags);
  const auto environment = rank_environment();
  if (environment && environment->world_size > 1) return run_as_rank(flags, *environment);
  return run_here(flags);
}

}  // namespace

void add_doctor(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "doctor", "Look at this host, or several and the network between them, before a run.");
  command.footer(kDoctorExplanation);
  const auto flags = std::make_shared<DoctorFlags>();
  command.add_option("--hosts", flags->hosts, "Others, besides this one; started there over ssh")
      ->option_text("B,C,...");
  command.add_option("--ssh", flags->ssh, "What starts a command on a host, without the host")
      ->option_text("COMMAND [ssh]");
  command.add_option("--remote", flags->remote, "How the program is called on the other hosts")
      ->option_text("PATH [lockstep]");
  command.add_option("--address", flags->address, "Where the other hosts reach this one")
      ->option_text("HOST");
  command.add_option("--workers", flags->host.workers, "Workers that a host would run")
      ->check(CLI::PositiveNumber)
      ->option_text("N [1]");
  command.add_option("--out", flags->host.folder, "Where the run would write")->option_text("DIR");
  command.add_option("--port", flags->host.port, "Where the run would listen")->option_text("PORT");
  command.add_option("--interface", flags->host.interface, "Network interface it would use")
      ->option_text("NAME");
  command.add_option("--token-file", flags->host.token_file, "The job's secret")
      ->option_text("FILE");
  command.add_option("--timeout", flags->timeout, "How long to wait for others; in seconds")
      ->check(CLI::PositiveNumber)
      ->option_text("S [20]");
  command.add_flag("--json", flags->json, "JSON instead of a table");
  command.add_option("--member", flags->member, "")->group("");
  command.callback([flags, &action] { action = [flags] { return run_doctor(*flags); }; });
}

}  // namespace lockstep::cli
