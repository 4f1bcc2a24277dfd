#include "lockstep/launch/start_rank.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <string_view>
#include <vector>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host.h"
#include "lockstep/launch/piped_process.h"
#include "lockstep/launch/rank_environment.h"

extern char** environ;

namespace lockstep {
namespace {

// What a launcher tells its ranks, and these not theirs.
constexpr std::string_view kOfALauncher[] = {
    kRankVariable,         kWorldSizeVariable,  kLocalRankVariable, kLaunchedVariable,
    kMasterHostVariable,   kMasterPortVariable, kListenerVariable,  kHostedVariable,
    kAttemptVariable,      kSecretVariable,     kNewcomerVariable,  kFlightMemoryVariable,
    kFlightFolderVariable, kStatusVariable};

std::vector<std::string> environment_for(const RankSetup& setup, const LaunchOptions& options) {
  std::vector<std::string> variables = {fmt::format("{}={}", kLaunchedVariable, setup.place)};
  if (setup.newcomer) {
    variables.push_back(fmt::format("{}=1", kNewcomerVariable));
  } else {
    variables.push_back(fmt::format("{}={}", kRankVariable, setup.place));
    variables.push_back(fmt::format("{}={}", kWorldSizeVariable, world_size(options)));
  }
  variables.push_back(fmt::format("{}={}", kLocalRankVariable, setup.place));
  variables.insert(variables.end(), options.environment.begin(), options.environment.end());
  if (setup.rendezvous) {
    variables.push_back(fmt::format("{}={}", kMasterHostVariable, setup.rendezvous->host));
    variables.push_back(fmt::format("{}={}", kMasterPortVariable, setup.rendezvous->port));
    variables.push_back(fmt::format("{}=1", kHostedVariable));
    variables.push_back(fmt::format("{}={}", kAttemptVariable, setup.attempt));
  }
  if (setup.secret >= 0) variables.push_back(fmt::format("{}={}", kSecretVariable, setup.secret));
  variables.push_back(fmt::format("{}={}", kFlightMemoryVariable, setup.flight));
  if (!options.flight_folder.empty()) {
    variables.push_back(fmt::format("{}={}", kFlightFolderVariable, options.flight_folder));
  }
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text(*variable);
    const std::string_view name = text.substr(0, text.find('='));
    if (std::ranges::find(kOfALauncher, name) != std::end(kOfALauncher)) continue;
    variables.emplace_back(text);
  }
  return variables;
}

// Every rank stays on its share of the cores: schedulers like to put two that talk on one core.
cpu_set_t cores_for(int rank, int ranks) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : share_of_cores(own_cores(), rank, ranks)) CPU_SET(core, &set);
  return set;
}

// Between fork and exec: system calls only.
[[noreturn]] void become_rank(const RankSetup& setup, pid_t parent, const cpu_set_t& cores,
                              const char* program, char* const* arguments,
                              char* const* environment) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);  // it ended before we asked to end with it
  ::sched_setaffinity(0, sizeof cores, &cores);
  for (const int number : {SIGUSR1, SIGUSR2}) ::signal(number, SIG_IGN);  // until it listens
  ::signal(SIGHUP, SIG_IGN);  // a terminal that is closed tells all at once: we stop it in order
  ::sigprocmask(SIG_SETMASK, &setup.signals, nullptr);
  ::dup2(setup.messages, STDERR_FILENO);
  if (setup.secret >= 0) ::fcntl(setup.secret, F_SETFD, 0);
  ::fcntl(setup.flight, F_SETFD, 0);
  if (setup.place > 0 || setup.newcomer) {  // only the first one reads what we are told
    const int nothing = ::open("/dev/null", O_RDONLY);
    ::dup2(nothing, STDIN_FILENO);
    ::close(nothing);
  }
  if (*program != '\0') {
    ::execvpe(program, arguments, environment);
  } else {
    ::execve("/proc/self/exe", arguments, environment);
  }
  constexpr std::string_view kText = "the program could not be started\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText.data(), kText.size());
  ::_exit(1);
}

}  // namespace

int world_size(const LaunchOptions& options) {
  return options.expect > 0 ? options.expect : options.ranks;
}

pid_t start_rank(const RankSetup& setup, const LaunchOptions& options) {
  std::vector<std::string> environment = environment_for(setup, options);
  std::vector<std::string> arguments = options.arguments;
  arguments.insert(arguments.begin(), options.program.empty() ? "lockstep" : options.program);
  const std::vector<char*> argv = pointers_to(arguments);
  const std::vector<char*> envp = pointers_to(environment);
  const cpu_set_t cores = cores_for(setup.place, options.ranks);
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw_io("fork", errno);
  if (pid == 0) {
    become_rank(setup, parent, cores, options.program.c_str(), argv.data(), envp.data());
  }
  return pid;
}

}  // namespace lockstep
