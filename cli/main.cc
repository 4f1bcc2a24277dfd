#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <string>

#include "cli/commands.h"
#include "cli/help_pages.h"
#include "cli/options.h"
#include "lockstep/base/error.h"
#include "lockstep/base/exit_code.h"
#include "lockstep/base/log.h"
#include "lockstep/base/version.h"
#include "lockstep/launch/launch.h"

namespace lockstep::cli {
namespace {

constexpr const char* kExplanation = R"(A text of one's own:

  lockstep train my.txt --out my-model
  lockstep generate my-model --prompt "Once"

`lockstep train --help` explains the options of a command.)";

constexpr const char* kBenchExplanation = R"(  lockstep bench allreduce --ranks 4 --bytes 1KiB,25MiB
  lockstep bench step --model small

`lockstep bench step --help` explains the options of a command.)";

int exit_code(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kInvalidArgument: return kExitUsage;
    case ErrorCode::kNonFinite:
    case ErrorCode::kReplicaMismatch: return kExitHalted;
    default: return is_launched_echo(error) ? kExitEcho : kExitFailed;
  }
}

// Files and options speak for themselves; other codes say what kind of failure it was.
std::string plain_text_of(const Error& error) {
  const bool plain = error.code() == ErrorCode::kInvalidArgument || error.code() == ErrorCode::kIo;
  return plain ? std::string(error.message()) : error.what();
}

// Every shard is an open file, and every rank a connection; the usual limit of 1024 is there for
// programs that call select(). Workers inherit it. No more than is of use: some programs close all
// that could be open, one by one.
void raise_file_limit() {
  constexpr rlim_t kMostFiles = 65536;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= kMostFiles) return;
  limit.rlim_cur = std::min(limit.rlim_max, kMostFiles);
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

// A file or connection that got the number of a closed stream would have our lines written into it.
void open_standard_streams() {
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream) {
    if (::fcntl(stream, F_GETFD) < 0) ::open("/dev/null", O_RDWR);  // takes the lowest number
  }
}

// What a full disk swallows must not pass for success.
int with_output_written(int code) {
  const bool flushed = std::fflush(stdout) == 0;
  const int error = errno;
  if (flushed && std::ferror(stdout) == 0) return code;
  log(LogLevel::kError, "standard output could not be written{}",
      flushed ? "" : fmt::format(": {}", std::strerror(error)));
  return code == 0 ? kExitFailed : code;
}

// What `lockstep launch` is to start: the words behind "--", which are no longer among `arguments`.
std::vector<std::string> take_launched(std::vector<std::string>& arguments) {
  const auto dashes = std::ranges::find(arguments, "--");
  if (arguments.empty() || arguments[0] != "launch" || dashes == arguments.end()) return {};
  std::vector<std::string> behind(dashes + 1, arguments.end());
  arguments.erase(dashes, arguments.end());
  return behind;
}

int run(int argc, char** argv) {
  CLI::App app{"Data-parallel training of transformer language models.", "lockstep"};
  app.set_version_flag("--version", fmt::format("lockstep {}", version()));
  Action action;
  app.footer(kExplanation);
  app.formatter(std::make_shared<WrappedHelp>());
  app.require_subcommand(0, 1);  // of further words a folder may be called as a command is
  std::vector<std::string> arguments(argv + 1, argv + argc);
  const bool wants_help = !arguments.empty() && arguments[0] == "help";  // lockstep help train
  if (wants_help) arguments.erase(arguments.begin());
  const std::vector<std::string> launched = take_launched(arguments);
  add_train(app, arguments, action);
  add_launch(app, launched, action);
  add_data(app, action);
  add_generate(app, action);
  add_verify(app, action);
  std::vector<std::string> program;
  add_run(app, program, action);
  add_report(app, action);
  add_explain(app, action);
  add_doctor(app, action);
  CLI::App& bench = *app.add_subcommand("bench", "Measure this machine and its network.");
  bench.require_subcommand(1);
  bench.footer(kBenchExplanation);
  add_bench_allreduce(bench, arguments, action);
  add_bench_step(bench, action);
  add_coordinator(app, action);
  add_worker(app, action);
  add_completion(app, action);
  add_share(app, action);
  add_agent(app, action);

  let_the_last_count(app);
  if (!arguments.empty() && arguments[0] == "run") {
    program = take_program(*app.get_subcommand("run"), arguments);
  }

  if (wants_help) {
    if (const auto problem = unknown_command(app, arguments)) {
      log_line(LogLevel::kError, *problem);
      return kExitUsage;
    }
    arguments.emplace_back("--help");
  }
  if (const auto problem = missing_value(app, arguments)) {
    log_line(LogLevel::kError, *problem);
    return kExitUsage;
  }
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help and --version
    log_line(LogLevel::kError, usage_problem(app, error));
    return kExitUsage;
  }
  if (!action) {  // not require_subcommand(): that would hide which argument was wrong
    log_line(LogLevel::kError, "lockstep needs a command (lockstep --help lists them)");
    return kExitUsage;
  }
  return action();
}

}  // namespace
}  // namespace lockstep::cli

int main(int argc, char** argv) {
  using namespace lockstep;
  cli::open_standard_streams();
  cli::raise_file_limit();
  try {
    return cli::with_output_written(cli::run(argc, argv));
  } catch (const Error& error) {
    // Without words: another rank has told them.
    if (!error.message().empty()) log_line(LogLevel::kError, cli::plain_text_of(error));
    return cli::exit_code(error);
  } catch (const std::filesystem::filesystem_error& error) {
    log(LogLevel::kError, "{}: {}", error.path1().string(), error.code().message());
    return kExitFailed;
  } catch (const std::exception& error) {
    if (std::ferror(stdout) != 0) return cli::with_output_written(kExitFailed);
    log_line(LogLevel::kError, error.what());
    return kExitFailed;
  }
}
