#include "cli/commands.h"

namespace lockstep::cli {

void add_bench(CLI::App& app, const std::vector<std::string>& arguments, Job& job) {
  CLI::App& bench = *app.add_subcommand("bench", "Measure this machine and its network.");
  bench.require_subcommand(1);
  add_bench_allreduce(bench, arguments, job);
  add_bench_step(bench, job);
}

}  // namespace lockstep::cli
