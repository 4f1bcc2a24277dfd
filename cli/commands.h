#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/launch/host_agent.h"

namespace lockstep::cli {

// What the command line asked for; returns the exit code. Parsing only chooses it, main runs it
// once the whole line is known to be right, so that wrong usage never starts anything.
using Action = std::function<int()>;

// One function per subcommand, each in a file of its own: adds the subcommand with its options to
// `app` and, when it is chosen, sets `action`. `arguments` are the program's own, for commands that
// start themselves again as ranks. All outlive the parse.
void add_train(CLI::App& app, const std::vector<std::string>& arguments, Action& action);
// What a host of `lockstep launch` runs for its part of a training run.
HostCommand train_on_host(const HostOrder& order);
// `behind` is what follows "--".
void add_launch(CLI::App& app, const std::vector<std::string>& behind, Action& action);
void add_agent(CLI::App& app, Action& action);
void add_data(CLI::App& app, Action& action);
void add_generate(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);
// `program` is what run starts, with its arguments, which main has taken off the line.
void add_run(CLI::App& app, const std::vector<std::string>& program, Action& action);
void add_report(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);
void add_explain(CLI::App& app, Action& action);
void add_coordinator(CLI::App& app, Action& action);
void add_worker(CLI::App& app, Action& action);
void add_bench_allreduce(CLI::App& bench, const std::vector<std::string>& arguments,
                         Action& action);
void add_bench_step(CLI::App& bench, Action& action);
// Both tell of all subcommands of `app`, which are complete when they run.
void add_completion(CLI::App& app, Action& action);
void add_share(CLI::App& app, Action& action);

}  // namespace lockstep::cli
