#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/help_pages.h"
#include "cli/options.h"
#include "lockstep/files/atomic_file.h"

namespace lockstep::cli {
namespace {

constexpr const char* kCompletionExplanation =
    R"(`make install` puts completions where shells look for them. Without it:

  source <(lockstep completion bash)                                       # in ~/.bashrc
  source <(lockstep completion zsh)                                        # in ~/.zshrc, behind compinit
  lockstep completion fish > ~/.config/fish/completions/lockstep.fish      # once)";

std::string completion_for(const std::string& shell, std::span<const HelpCommand> commands) {
  if (shell == "bash") return bash_completion(commands);
  return shell == "zsh" ? zsh_completion(commands) : fish_completion(commands);
}

void write_below(const std::filesystem::path& path, const std::string& text) {
  make_folder(path.parent_path());
  write_file(path, text);
}

// What belongs into the folder `share` of an installation.
void write_share(const std::filesystem::path& folder, std::span<const HelpCommand> commands) {
  write_below(folder / "bash-completion/completions/lockstep", bash_completion(commands));
  write_below(folder / "zsh/site-functions/_lockstep", zsh_completion(commands));
  write_below(folder / "fish/vendor_completions.d/lockstep.fish", fish_completion(commands));
  for (const HelpCommand& command : commands) {
    write_below(folder / "man/man1" / (command.name('-') + ".1"), man_page(commands, command));
  }
}

}  // namespace

void add_completion(CLI::App& app, Action& action) {
  CLI::App& command =
      *app.add_subcommand("completion", "Print what a shell needs to complete commands.");
  command.footer(kCompletionExplanation);
  const auto shell = std::make_shared<std::string>();
  command.add_option("shell", *shell, "bash, zsh or fish")
      ->check(one_of({"bash", "zsh", "fish"}))
      ->required()
      ->option_text("SHELL");
  command.callback([shell, &app, &action] {
    action = [shell, &app] {
      fmt::print("{}", completion_for(*shell, help_of(app)));
      return 0;
    };
  });
}

void add_share(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand("share", "Write man pages and completions to a folder.");
  command.group("");  // for the build only
  const auto folder = std::make_shared<std::string>();
  command.add_option("folder", *folder, "Where to")->required()->option_text("DIR");
  command.callback([folder, &app, &action] {
    action = [folder, &app] {
      write_share(*folder, help_of(app));
      return 0;
    };
  });
}

}  // namespace lockstep::cli
