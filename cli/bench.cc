#include "cli/commands.h"

namespace lockstep::cli {

void add_bench(CLI::App& app, const std::vector<std::string>& arguments, Action& action) {
  CLI::App& bench = *app.add_subcommand("bench", "Measure this machine and its network.");
  bench.require_subcommand(1);
  add_bench_allreduce(bench, arguments, action);
  add_bench_step(bench, action);
}

}  // namespace lockstep::cli
