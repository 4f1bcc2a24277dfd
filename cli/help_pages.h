#pragma once

#include <CLI/CLI.hpp>
#include <span>
#include <string>
#include <vector>

namespace lockstep::cli {

// What the help of a command says, for completions of shells and man pages. Pure.

// The help on a terminal: descriptions of options are broken into lines.
class WrappedHelp : public CLI::Formatter {
 public:
  std::string make_option_desc(const CLI::Option* option) const override;
};

struct HelpOption {
  std::vector<std::string> names;  // "--data", "-h"; none: only an argument without a name
  std::string value;               // "N [16]"; empty: a flag
  std::string description;
  std::string group;
  std::vector<std::string> choices;  // of the value, where there are only some
  bool argument = false;             // may be given without a name

  bool required = false;  // an argument that must be given

  // What stands for the value: "N"; without brackets, which say that it may be left out.
  std::string placeholder() const;
  bool takes_file() const;  // perhaps beside choices
  bool takes_folder() const;
};

struct HelpCommand {
  std::vector<std::string> words;  // "lockstep", "bench", "step"
  std::string description;
  std::string explanation;
  std::vector<HelpOption> options;
  std::vector<std::size_t> commands;  // places of its subcommands in the list

  std::string name(char between = ' ') const;
};

// The command and all below it that are not hidden, parents first.
std::vector<HelpCommand> help_of(const CLI::App& app);

std::string bash_completion(std::span<const HelpCommand> commands);
std::string zsh_completion(std::span<const HelpCommand> commands);
std::string fish_completion(std::span<const HelpCommand> commands);

// A page of section 1, in roff.
std::string man_page(std::span<const HelpCommand> commands, const HelpCommand& command);

}  // namespace lockstep::cli
