#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/options.h"
#include "lockstep/base/error.h"
#include "lockstep/launch/host_agent.h"
#include "lockstep/launch/launch_hosts.h"
#include "lockstep/report/training_log.h"

namespace lockstep::cli {
namespace {

constexpr const char* kLaunchExplanation =
    R"(Starts `lockstep train` on every host by ssh, which must let you in without a password. The first host starts
the job and is its centre; the others join it, and need no way to this machine. b:4 is four workers on b. A host
file has a host on each line, with slots=4 behind it and comments behind #, as mpirun has it.

The program, the current folder and all paths behind `train` are as they are on each host; --out is written on the
first. Lines of the hosts have the host's name ahead. The job's secret is new for every launch and goes through
ssh's standard input.

Ctrl-C stops and saves; a second one ends all at once. A host that refuses ends the launch and is named; one that is
lost while the run goes on is named, and the others go on with the same bits. When this process ends, however it
does, the processes on all hosts end.
Exit codes: those of `lockstep train` on the first host; 1 for a host that cannot be used, which is named.

  lockstep launch --hosts a,b:4,c -- train --data my.txt --out my-model
  lockstep launch --hostfile hosts --ssh "ssh -p 2222 -i key" -- train --resume my-model)";

struct LaunchFlags {
  std::string hosts;
  std::string host_file;
  std::string shell;
  std::string program;
  std::string folder;
  std::vector<std::string> variables;
  double timeout = 30;
};

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("opening {}: {}", path, std::strerror(errno)));
  }
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// Without a value, that of this process.
std::string variable(const std::string& text) {
  const std::string name = text.substr(0, text.find('='));
  if (name.empty()) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("--env {}: not NAME or NAME=VALUE", text));
  }
  if (name.size() < text.size()) return text;
  const char* value = std::getenv(name.c_str());
  if (value == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("--env {}: it is not set here", name));
  }
  return fmt::format("{}={}", name, value);
}

int run_launch(const LaunchFlags& flags, const std::vector<std::string>& behind) {
  LaunchHostsOptions options;
  options.hosts = flags.hosts.empty() ? parse_host_file(text_of(flags.host_file), flags.host_file)
                                      : parse_hosts(flags.hosts);
  if (!flags.shell.empty()) options.shell = CLI::detail::split_up(flags.shell);
  options.program = flags.program.empty() ? std::filesystem::read_symlink("/proc/self/exe").string()
                                          : flags.program;
  options.folder = flags.folder.empty() ? std::filesystem::current_path().string() : flags.folder;
  for (const std::string& text : flags.variables) options.variables.push_back(variable(text));
  options.arguments.assign(behind.begin() + 1, behind.end());
  options.log = to_string(default_log_style());
  options.timeout = std::chrono::ceil<std::chrono::milliseconds>(duration_of(flags.timeout));
  return launch_hosts(options);
}

}  // namespace

void add_launch(CLI::App& app, const std::vector<std::string>& behind, Action& action) {
  CLI::App& command = *app.add_subcommand("launch", "Train on several hosts, by ssh.");
  command.footer(kLaunchExplanation);
  const auto flags = std::make_shared<LaunchFlags>();
  CLI::Option* hosts =
      command.add_option("--hosts", flags->hosts, "The hosts, and how many workers each gets")
          ->option_text("HOST[:N],...");
  command
      .add_option("--hostfile", flags->host_file, "A file with a host on each line: HOST slots=N")
      ->option_text("FILE")
      ->excludes(hosts);
  command
      .add_option("--ssh", flags->shell,
                  "Starts a command on a host: these words, the host's name, the command")
      ->option_text("COMMAND [ssh -o BatchMode=yes]");
  command.add_option("--program", flags->program, "Where lockstep is on the hosts")
      ->option_text("PATH [the path of this one]");
  command.add_option("--chdir", flags->folder, "The folder on the hosts that it is started in")
      ->option_text("PATH [the current one]");
  command
      .add_option("--env", flags->variables,
                  "A variable for the environment of all workers; may be given several times")
      ->option_text("NAME[=VALUE]")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command
      .add_option("--timeout", flags->timeout,
                  "A host that is silent for S seconds counts as lost, and a host that "
                  "hears nothing from this process for S seconds stops")
      ->transform(real_number(0.1, 1e6))
      ->option_text("S [30]");
  command.callback([flags, &behind, &action] {
    if (flags->hosts.empty() && flags->host_file.empty()) {
      throw CLI::ValidationError("lockstep launch needs --hosts HOST,HOST or --hostfile FILE");
    }
    if (behind.empty() || behind[0] != "train") {
      throw CLI::ValidationError("lockstep launch needs -- train and its options at the end");
    }
    action = [flags, &behind] { return run_launch(*flags, behind); };
  });
}

void add_agent(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand("agent", "The end of `lockstep launch` on a host.");
  command.group("");  // for `lockstep launch` only
  command.callback([&action] { action = [] { return run_host_agent(train_on_host); }; });
}

}  // namespace lockstep::cli
