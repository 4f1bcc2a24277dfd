#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/options.h"
#include "lockstep/base/error.h"
#include "lockstep/launch/launch.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/run/flight_watch.h"
#include "lockstep/wire/join_messages.h"

namespace lockstep::cli {
namespace {

constexpr const char* kRunExplanation =
    R"(Starts N workers of a program of your own on this machine, each on its share of the cores, and waits for
them. A worker finds its place in RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, where
lockstep::join() of C++, lockstep_join() of C and lockstep.join() of Python look. A PROGRAM that ends in .py is
started with python3. What a worker writes to stderr gets "[rank 2] " ahead of every line.

Where the workers join with `survive`, a worker that is lost is started anew and joins the others
(--fail-fast: the first loss ends all). Otherwise the first loss ends the job. Ctrl-C is passed on to all
workers, and ends those that have not stopped after 10 seconds. The exit code is that of the worker which is
to blame, and the last line says which it is.

  lockstep run --workers 3 train.py --steps 100
  lockstep run --workers 3 -- ./my_program --fast)";

constexpr std::chrono::seconds kStopGrace{10};

struct RunFlags {
  int workers = 1;
  double timeout = 30;
  bool fail_fast = false;
};

bool is_program(const std::string& path) {
  std::error_code none;
  return ::access(path.c_str(), X_OK) == 0 && !std::filesystem::is_directory(path, none);
}

// Whether a program of this name can be started, as a shell would look for it.
bool can_be_started(const std::string& program) {
  if (program.find('/') != std::string::npos) return is_program(program);
  const char* path = std::getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "/usr/bin:/bin");
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string file = (folder.empty() ? "." : folder) + "/" + program;
    if (is_program(file)) return true;
  }
  return false;
}

std::string why_not_started(const std::string& program) {
  std::error_code none;
  if (!std::filesystem::exists(program, none)) return "there is no such program";
  if (std::filesystem::is_directory(program, none)) return "this is a folder, and not a program";
  if (::access(program.c_str(), X_OK) == 0) {
    return fmt::format("there is no such program in PATH; the one in this folder is ./{}", program);
  }
  return "this file is not executable (chmod +x makes it so)";
}

int run_program(const RunFlags& options, std::vector<std::string> program) {
  if (program.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "run needs a program to start: lockstep run --workers 3 train.py");
  }
  if (program[0].ends_with(".py")) {
    if (::access(program[0].c_str(), R_OK) != 0) {
      throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: no such file", program[0]));
    }
    const char* python = std::getenv("LOCKSTEP_PYTHON");  // of `python -m lockstep`
    program.insert(program.begin(), python != nullptr ? python : "python3");
  }
  if (!can_be_started(program[0])) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: {}", program[0], why_not_started(program[0])));
  }
  LaunchOptions launch;
  launch.ranks = options.workers;
  launch.program = program[0];
  launch.arguments.assign(program.begin() + 1, program.end());
  launch.survive = !options.fail_fast && options.workers > 1;
  launch.prefix_lines = true;
  launch.stop_grace = kStopGrace;
  launch.secret = random_secret();  // nobody but these workers joins their job
  const FlightPlace flight = FlightPlace::of("");
  launch.flight_folder = flight.folder;
  launch.flight_keeps = flight.keeps;
  HostOptions job;
  job.world_size = options.workers;
  job.token = launch.secret;
  job.timeout = duration_of(options.timeout);
  launch.job = job;
  return launch_ranks(launch);
}

}  // namespace

void add_run(CLI::App& app, const std::vector<std::string>& program, Action& action) {
  CLI::App& command = *app.add_subcommand("run", "Start workers of a program of your own.");
  command.footer(kRunExplanation);
  const auto options = std::make_shared<RunFlags>();
  const auto shown = std::make_shared<std::vector<std::string>>();  // main takes them off the line
  command.add_option("program", *shown, "What to start, with its arguments")
      ->option_text("PROGRAM ...");
  command.add_option("--workers", options->workers, "Workers to start on this machine")
      ->transform(whole_number(1, kMaxWorldSize))
      ->option_text("N [1]");
  command
      .add_option("--timeout", options->timeout,
                  "A worker that is silent for S seconds counts as dead")
      ->transform(real_number(0.01, 1e7))
      ->option_text("S [30]");
  command.add_flag("--fail-fast", options->fail_fast,
                   "The first worker that is lost ends all workers; none is restarted");
  command.callback([options, shown, &program, &action] {
    action = [options, shown, &program] { return run_program(*options, program); };
  });
}

}  // namespace lockstep::cli
