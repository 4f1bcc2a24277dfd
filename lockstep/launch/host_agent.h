#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

// What a host of `lockstep launch` is to do: start the job, or join it.
struct HostOrder {
  bool joins = false;
  int workers = 1;
  int expect = 0;                      // of the whole job; only where it is started
  std::string address;                 // HOST:PORT to join, or where to listen
  std::string log;                     // the style of the log; empty: as `lockstep train` chooses
  std::vector<std::string> arguments;  // behind `lockstep train`, as the user gave them
};

// The command line of this program that does it, and where it lets others join ("" if it does not).
// Throws for options that make no sense.
struct HostCommand {
  std::vector<std::string> arguments;
  std::string listen;
};
using HostCommandFor = std::function<HostCommand(const HostOrder&)>;

// The end of `lockstep launch` on a host: runs what it orders on standard input (agent_message.h)
// as a child process, passes its output on, and ends it when the launcher goes: when the input is
// closed, or silent for the launcher's timeout. The child is then told to stop, has as long again
// to save, and is killed. Returns the child's exit code.
int run_host_agent(const HostCommandFor& command_for);

}  // namespace lockstep
