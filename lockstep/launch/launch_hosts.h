#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "lockstep/launch/host_list.h"

namespace lockstep {

struct LaunchHostsOptions {
  std::vector<LaunchHost> hosts;
  // Starts a command on a host: these words, the host's name, the command.
  std::vector<std::string> shell = {"ssh", "-o", "BatchMode=yes"};
  std::string program;                  // this one, as it is found on the hosts
  std::string folder;                   // where it is started there
  std::vector<std::string> variables;   // "NAME=value", for all workers
  std::vector<std::string> arguments;   // behind `lockstep train`
  std::string log;                      // the style of the log, if the arguments do not say it
  std::chrono::milliseconds timeout{};  // a host that is silent for so long is lost
};

// Runs one `lockstep train` on several hosts. An agent (host_agent.h) is started on each by the
// remote shell. When all are there the first host starts the job and is its centre; the others join
// it. The job's token is made here and travels through the shells' standard input.
//
// What hosts write to stderr is passed on with the host ahead of every line, what they print to
// stdout as it is. SIGINT, SIGTERM and SIGHUP stop the job, which saves first; a second one ends it
// at once. SIGUSR1 and SIGUSR2 go to the first host.
//
// Until the job has formed, a host that refuses, lacks the program or fails ends the launch, and is
// named. From then on a host that is lost is named, and the others go on. Returns the exit code of
// the first host's `lockstep train`, if that host is lost 0 if another came to the end; 1 for a
// host that could not be used; 128 + the signal that stopped it. No process on any host outlives
// this one for longer than twice the timeout.
int launch_hosts(const LaunchHostsOptions& options);

}  // namespace lockstep
