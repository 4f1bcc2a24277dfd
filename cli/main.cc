#include <fmt/format.h>

#include <cstdio>
#include <exception>

#include "cli/commands.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/version.h"
#include "lockstep/launch/launch.h"

namespace lockstep::cli {
namespace {

constexpr int kFailed = 1;
constexpr int kWrongUsage = 2;
constexpr int kHalted = 3;

int exit_code(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kInvalidArgument: return kWrongUsage;
    case ErrorCode::kNonFinite:
    case ErrorCode::kReplicaMismatch: return kHalted;
    default: return is_launched_echo(error) ? kEchoCode : kFailed;
  }
}

int run(int argc, char** argv) {
  CLI::App app{"Data-parallel training of transformer language models.", "lockstep"};
  app.set_version_flag("--version", fmt::format("lockstep {}", version()));
  Action action;
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  add_train(app, arguments, action);
  add_data(app, action);
  add_generate(app, action);
  add_verify(app, action);
  CLI::App& bench = *app.add_subcommand("bench", "Measure this machine and its network.");
  bench.require_subcommand(1);
  add_bench_allreduce(bench, arguments, action);
  add_bench_step(bench, action);
  add_coordinator(app, action);
  add_worker(app, action);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kWrongUsage;  // --help and --version arrive here too
  }
  if (!action) {  // not require_subcommand(): that would hide which argument was wrong
    std::fputs("a subcommand is required; --help lists them\n", stderr);
    return kWrongUsage;
  }
  return action();
}

}  // namespace
}  // namespace lockstep::cli

int main(int argc, char** argv) {
  using namespace lockstep;
  try {
    return cli::run(argc, argv);
  } catch (const Error& error) {
    log_line(LogLevel::kError, error.what());
    return cli::exit_code(error);
  } catch (const std::exception& error) {
    log_line(LogLevel::kError, error.what());
    return cli::kFailed;
  }
}
