// Launches itself as ranks (lockstep/launch/launch.h), each of which does what it is told:
//
//   launch_puppet [--prefix] [--grace MS] [--stop-grace MS] [--end-grace MS] [--server] [--survive]
//                 [--join] ACTION...
//
// One action per rank:
//
//   ok        says hello                     exit:N    says that it is the culprit and ends with N
//   die       kills itself                   wait      waits for ever
//   stubborn  waits and ignores signals      save      waits for a signal, then says that it saved
//   bar       draws a progress bar           star      joins the server, sums, leaves
//   star:die  joins the server, kills itself   last:...  the same when it is the only one left
//   work      makes steps in a job that survives losses until it is told to stop; rank 0 tells
//             every step and how many made it. work:exit:N, work:die: the same until step 20, which
//             ends the worker; newcomers go on. work:end: ends the run with step 20; work:end:stop
//             likewise, but stops before it says goodbye; work:end:fail fails after it
//   come:die  works, but newcomers kill themselves; come:join:die: once they are in the job
//   in:...    the same, in a job of others
//   gone      computes in a job of others and kills itself; whoever is started for it finds nobody.
//             LAUNCH_PUPPET_GONE names the file by which they know
//   lacks     likewise, but whoever is started for it lacks something and fails with code 1
//
// With --join it starts newcomers to a job that is elsewhere.

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <utility>

#include "lockstep/base/descriptor.h"
#include "lockstep/base/error.h"
#include "lockstep/base/exit_code.h"
#include "lockstep/base/log.h"
#include "lockstep/comm/flight_recorder.h"
#include "lockstep/launch/launch.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/lockstep.h"
#include "lockstep/server/server_engine.h"
#include "lockstep/server/server_run.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

constexpr std::string_view kLast = "last:";
constexpr std::string_view kIn = "in:";
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
  comm->barrier();
  say_ready(comm->rank());
  if (die) ::raise(SIGKILL);
  std::vector<std::int64_t> data = {comm->rank() + 1};
  comm->all_reduce(std::span(data), ReduceOp::kSum);
  fmt::print("sum {}\n", data[0]);
  comm->barrier();
  return 0;
}

// Steps that are sums over the ranks: how far they are, and what they were asked to do.
struct Puppet {
  Job job;
  std::int64_t step = 0;
  int stop = 0;
  bool came_to_end = false;

  void make_steps(std::int64_t last, const std::function<void()>& end) {
    while (stop == 0) {
      const JobWishes wishes = job.wishes();
      std::vector<std::int64_t> told = {step, wishes.stop, wishes.regroup ? 1 : 0};
      job.communicator().all_reduce(std::span(told), ReduceOp::kMax);
      step = told[0] + 1;  // whoever came later stands where the others do
      stop = static_cast<int>(told[1]);
      if (job.rank() == 0) {
        fmt::print("step {} workers {}\n", step, job.world_size());
        std::fflush(stdout);
      }
      // A rank that was not through with the last step when another one went comes to the next one.
      if (step >= last && !std::exchange(came_to_end, true)) end();
      if (told[2] != 0 && stop == 0) job.regroup(step, Regroup::kInOrder);
    }
    job.leave();
  }
};

constexpr int kEnd = -128;  // instead of a signal's number

int work(const std::string& action, const RankEnvironment& environment) {
  JoinOptions options;
  options.transport = TransportKind::kTcp;
  options.timeout = 2s;
  options.survive = true;
  if (const char* coordinator = std::getenv(kCoordinator)) {
    options.transport = TransportKind::kServer;
    options.coordinator = coordinator;
  }
  Puppet puppet{join(JoinOptions::from_environment(options))};
  if (environment.newcomer() && action == "come:die") ::raise(SIGKILL);
  const auto end = [&] {
    if (environment.newcomer()) return;
    if (action == "work:die") ::raise(SIGKILL);
    if (action.starts_with("work:end")) puppet.stop = kEnd;
    if (action.starts_with("work:exit:")) {
      fmt::print(stderr, "the culprit\n");
      std::fflush(stderr);
      ::_exit(std::atoi(action.c_str() + 10));
    }
  };
  if (puppet.job.newcomer()) {
    puppet.job.regroup(0, Regroup::kInOrder);
    if (action == "come:join:die") ::raise(SIGKILL);
  } else {
    puppet.job.describe({}, 100);
  }
  while (true) {
    try {
      puppet.make_steps(20, end);
      if (action == "work:end:stop") ::raise(SIGSTOP);
      if (action == "work:end:fail") {
        fmt::print(stderr, "the culprit\n");
        return 1;
      }
      return 128 + puppet.stop;
    } catch (const Error& error) {
      if (!puppet.job.survives(error)) throw;
      puppet.job.regroup(puppet.step, Regroup::kAfterLoss);
    }
  }
}

void wait_for_the_others() {
  const std::string children = fmt::format("/proc/{0}/task/{0}/children", ::getppid());
  const std::string alone = fmt::format("{} ", ::getpid());
  for (std::string left; left != alone;) {
    std::ifstream file(children);
    left.assign(std::istreambuf_iterator<char>(file), {});
  }
}

// Whether this is the first process that comes here.
bool is_first_of(const char* path) {
  return Descriptor(::open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600)) ? true : false;
}

int act(std::string action, const RankEnvironment& environment) {
  const int rank = environment.rank;
  if (action.starts_with(kLast)) {
    wait_for_the_others();
    action.erase(0, kLast.size());
  }
  std::optional<FlightRecorder> flight;  // by which the launcher knows
  if (action.starts_with(kIn)) {
    flight.emplace(Descriptor(*environment.flight));
    flight->set_place(environment.local_rank.value_or(0), 9, 1, 1);
    action.erase(0, kIn.size());
  }
  if (action == "gone" || action == "lacks") {
    if (!is_first_of(std::getenv("LAUNCH_PUPPET_GONE"))) {
      const Error nobody(ErrorCode::kTimeout, "nobody answers");
      fmt::print(stderr, "the culprit\n");
      return action == "gone" && is_launched_echo(nobody) ? kExitEcho : kExitFailed;
    }
    flight.emplace(Descriptor(*environment.flight));
    flight->set_place(environment.local_rank.value_or(0), 9, 1, 1);
    { const PhaseRecord computed(*flight, "forward", 1, 0); }
    ::raise(SIGKILL);
  }
  if (action.starts_with("work") || action.starts_with("come")) return work(action, environment);
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
    server_options.timeout = options.survive ? 2s : 20s;
    run.emplace(listen_tcp(SocketAddress::loopback_v4()), server_options);
    options.environment = {fmt::format("{}={}", kCoordinator, to_string(run->address()))};
    options.centre = run->control();
    options.finish_companion = [&run](bool succeeded) {
      return run->finish(Deadline::after(succeeded ? 5s : 1s));
    };
  }
  if (options.survive && !server && !options.joins) {
    options.job.emplace();
    options.job->timeout = 2s;
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
    if (flag == "--survive") options.survive = true;
    if (flag == "--join") options.joins = {"127.0.0.1", 1};
    if (flag == "--end-grace") options.end_grace = std::chrono::milliseconds(std::atoi(argv[++i]));
    if (flag == "--grace") options.grace = std::chrono::milliseconds(std::atoi(argv[++i]));
    if (flag == "--stop-grace")
      options.stop_grace = std::chrono::milliseconds(std::atoi(argv[++i]));
  }
  try {
    if (const auto environment = rank_environment()) {
      // A newcomer does what the first rank was told, or in a job of others its own part.
      const int place = options.joins ? *environment->local_rank : std::max(0, environment->rank);
      return act(argv[i + place], *environment);
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
