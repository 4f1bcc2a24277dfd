#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace lockstep::cli {

// What the command line asked for; returns the exit code. Parsing only chooses it, main runs it
// once the whole line is known to be right, so that wrong usage never starts anything.
using Action = std::function<int()>;

// One function per subcommand, each in a file of its own: adds the subcommand with its options to
// `app` and, when it is chosen, sets `action`. `arguments` are the program's own, for commands that
// start themselves again as ranks. All outlive the parse.
void add_train(CLI::App& app, const std::vector<std::string>& arguments, Action& action);
void add_data(CLI::App& app, Action& action);
void add_generate(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);
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
