// Launches itself as ranks (lockstep/launch/launch.h), each of which does what it is told:
//
//   launch_puppet [--prefix] [--grace MS] [--stop-grace MS] [--server] ACTION...
//
// One action per rank:
//
//   ok        says hello                     exit:N    says that it is the culprit and ends with N
//   die       kills itself                   wait      waits for ever
//   stubborn  waits and ignores signals      save      waits for a signal, then says that it saved
//   bar       draws a progress bar           star      joins the server, sums, leaves
//   star:die  joins the server, kills itself   last:...  the same when it is the only one left

#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "lockstep/base/log.h"
#include "lockstep/launch/launch.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/server/server_engine.h"
#include "lockstep/server/server_run.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

constexpr std::string_view kLast = "last:";
constexpr const char* kCoordinator = "LAUNCH_PUPPET_COORDINATOR";

void say_ready(int rank) {
  fmt::print("rank {} pid {}\n", rank, ::getpid());
  std::fflush(stdout);
}

[[noreturn]] void wait_for_ever() {
  while (true) ::pause();
}

int wait_and_save(int rank) {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGINT, SIGTERM}) sigaddset(&set, number);
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  say_ready(rank);
  int number = 0;
  ::sigwait(&set, &number);
  fmt::print(stderr, "saved\n");
  return 128 + number;
}

int join_the_star(const RankEnvironment& environment, bool die) {
  StarOptions options;
  options.coordinator = *parse_host_port(std::getenv(kCoordinator));
  options.rank = environment.rank;
  options.world_size = environment.world_size;
  const auto comm = connect_star(options, join_star(options));
  say_ready(comm->rank());
  if (die) ::raise(SIGKILL);
  std::vector<std::int64_t> data = {comm->rank() + 1};
  comm->all_reduce(std::span(data), ReduceOp::kSum);
  fmt::print("sum {}\n", data[0]);
  comm->barrier();
  return 0;
}

void wait_for_the_others() {
  const std::string children = fmt::format("/proc/{0}/task/{0}/children", ::getppid());
  const std::string alone = fmt::format("{} ", ::getpid());
  for (std::string left; left != alone;) {
    std::ifstream file(children);
    left.assign(std::istreambuf_iterator<char>(file), {});
  }
}

int act(std::string action, const RankEnvironment& environment) {
  const int rank = environment.rank;
  if (action.starts_with(kLast)) {
    wait_for_the_others();
    action.erase(0, kLast.size());
  }
  if (action == "ok") {
    fmt::print(stderr, "hello\nhello again\n");
    return 0;
  }
  if (action.starts_with("exit:")) {
    fmt::print(stderr, "the culprit\n");
    return std::atoi(action.c_str() + 5);
  }
  if (action == "die") return ::raise(SIGKILL);
  if (action == "save") return wait_and_save(rank);
  if (action == "bar") {
    fmt::print(stderr, "\r[=  ] 1/3\x1b[K\r[== ] 2/3\x1b[K\n");
    return 0;
  }
  if (action.starts_with("star")) return join_the_star(environment, action == "star:die");
  if (action == "stubborn") {
    for (const int number : {SIGINT, SIGTERM}) std::signal(number, SIG_IGN);
  }
  say_ready(rank);
  wait_for_ever();
}

int launch(int ranks, LaunchOptions options, bool server) {
  options.ranks = ranks;
  std::optional<ServerRun> run;
  if (server) {
    HostOptions server_options;
    server_options.world_size = ranks;
    server_options.timeout = 20s;
    run.emplace(listen_tcp(SocketAddress::loopback_v4()), server_options);
    options.environment = {fmt::format("{}={}", kCoordinator, to_string(run->address()))};
    options.finish_companion = [&run](bool succeeded) {
      return run->finish(Deadline::after(succeeded ? 5s : 1s));
    };
  }
  return launch_ranks(options);
}

int main(int argc, char** argv) {
  LaunchOptions options;
  options.arguments.assign(argv + 1, argv + argc);
  bool server = false;
  int i = 1;
  for (; i < argc && argv[i][0] == '-'; ++i) {
    const std::string_view flag(argv[i]);
    if (flag == "--prefix") options.prefix_lines = true;
    if (flag == "--server") server = true;
    if (flag == "--grace") options.grace = std::chrono::milliseconds(std::atoi(argv[++i]));
    if (flag == "--stop-grace")
      options.stop_grace = std::chrono::milliseconds(std::atoi(argv[++i]));
  }
  try {
    if (const auto environment = rank_environment()) {
      return act(argv[i + environment->rank], *environment);
    }
    return launch(argc - i, options, server);
  } catch (const Error& error) {
    log_line(LogLevel::kError, error.what());
    return 1;
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::main(argc, argv); }
