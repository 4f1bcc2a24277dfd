#include "cli/help_pages.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>
#include <string_view>

#include "cli/options.h"
#include "lockstep/base/version.h"

namespace lockstep::cli {
namespace {

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos;
       at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

std::vector<std::string> choices_of(const CLI::Option& option) {
  std::vector<std::string> choices;
  try {
    std::istringstream words(
        const_cast<CLI::Option&>(option).get_validator(kOneOf)->get_description());
    for (std::string word; words >> word;) choices.push_back(word);
  } catch (const CLI::OptionNotFound&) {  // it takes any value
  }
  return choices;
}

HelpOption help_of_option(const CLI::Option& option) {
  HelpOption help;
  for (const std::string& name : option.get_snames()) help.names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) help.names.push_back("--" + name);
  if (option.get_items_expected_max() > 0) help.value = option.get_option_text();
  help.description = option.get_description();
  help.group = option.get_group();
  help.choices = choices_of(option);
  help.argument = option.get_positional();
  help.required = option.get_required();
  return help;
}

void add_help(const CLI::App& app, std::vector<std::string> words, std::vector<HelpCommand>& list) {
  words.push_back(app.get_name());
  const std::size_t place = list.size();
  HelpCommand& help = list.emplace_back();
  help.words = words;
  help.description = app.get_description();
  help.explanation = app.get_footer();
  for (const CLI::Option* option : app.get_options()) {
    if (!option->get_group().empty()) help.options.push_back(help_of_option(*option));
  }
  for (const CLI::App* below : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (below->get_group().empty()) continue;
    list[place].commands.push_back(list.size());
    add_help(*below, words, list);
  }
}

// "'it''s'" for the shells, which all know quotes of this kind.
std::string shell_quoted(const std::string& text) {
  return "'" + replaced(text, "'", "'\\''") + "'";
}

// A word of bash's case: the command as far as it is known, and the word behind it.
std::string bash_case(const HelpCommand& command, const std::string& word) {
  std::string path;
  for (std::size_t i = 1; i < command.words.size(); ++i) {
    path += (i > 1 ? " " : "") + command.words[i];
  }
  return fmt::format("\"{} {}\"", path, word);
}

// What compgen is asked for.
std::string bash_kinds(const HelpOption& option) {
  std::string kinds;
  if (!option.choices.empty()) {
    kinds = "-W " + shell_quoted(fmt::format("{}", fmt::join(option.choices, " ")));
  }
  if (option.takes_folder()) kinds = "-d";
  if (option.takes_file()) kinds += kinds.empty() ? "-f" : " -f";
  return kinds;
}

std::string zsh_function(const HelpCommand& command) { return "_" + command.name('_'); }

std::string zsh_value(const HelpOption& option) {
  std::string from;
  if (!option.choices.empty()) from = fmt::format("({})", fmt::join(option.choices, " "));
  if (option.takes_folder()) from = "_files -/";
  if (option.takes_file()) {
    from = option.choices.empty()
               ? "_files"
               : fmt::format("{{compadd -- {}; _files}}", fmt::join(option.choices, " "));
  }
  return fmt::format(":{}:{}", replaced(option.placeholder(), ":", "\\:"), from);
}

std::string zsh_text(std::string text) {
  for (const std::string_view special : {"\\", "[", "]", ":"}) {
    text = replaced(text, special, "\\" + std::string(special));
  }
  return text;
}

void add_zsh_function(std::span<const HelpCommand> commands, const HelpCommand& command,
                      std::string& text) {
  text += zsh_function(command) + "() {\n";
  const bool parent = !command.commands.empty();
  if (parent) text += "  local state line\n  local -a commands\n";
  text += fmt::format("  _arguments {}", parent ? "-C" : "-s");
  for (const HelpOption& option : command.options) {
    const std::string value = option.value.empty() ? "" : zsh_value(option);
    for (const std::string& name : option.names) {
      text += " \\\n    " +
              shell_quoted(fmt::format("{}[{}]{}", name, zsh_text(option.description), value));
    }
    if (option.argument) text += " \\\n    " + shell_quoted("*" + value);
  }
  if (!parent) {
    text += "\n}\n\n";
    return;
  }
  text += " \\\n    '1:command:->command' \\\n    '*::argument:->argument'\n  case $state in\n";
  text += "    command)\n      commands=(";
  for (const std::size_t below : command.commands) {
    const HelpCommand& child = commands[below];
    text += "\n        " + shell_quoted(child.words.back() + ":" + zsh_text(child.description));
  }
  text += ")\n      _describe command commands ;;\n    argument)\n      case $line[1] in\n";
  for (const std::size_t below : command.commands) {
    const HelpCommand& child = commands[below];
    text += fmt::format("        {}) {} ;;\n", child.words.back(), zsh_function(child));
  }
  text += "      esac ;;\n  esac\n}\n\n";
  for (const std::size_t below : command.commands) {
    add_zsh_function(commands, commands[below], text);
  }
}

// Hyphens that can be copied, and no line that roff takes for a request.
std::string roff(const std::string& text) {
  std::string safe = replaced(replaced(text, "\\", "\\e"), "-", "\\-");
  if (safe.starts_with('.') || safe.starts_with('\'')) safe = "\\&" + safe;
  return safe;
}

// Paragraphs are separated by empty lines; what is indented stays as it is.
std::string roff_paragraphs(const std::string& explanation) {
  std::istringstream lines(explanation);
  std::string text;
  bool indented = false;
  for (std::string line; std::getline(lines, line);) {
    const bool indents = line.starts_with("  ");
    if (indents && !indented) text += ".RS 4\n.nf\n";
    if (!indents && indented) text += ".fi\n.RE\n";
    indented = indents;
    if (line.empty()) {
      text += ".PP\n";
    } else {
      text += roff(indents ? line.substr(2) : line) + "\n";
    }
  }
  return indented ? text + ".fi\n.RE\n" : text;
}

std::string roff_options(const HelpCommand& command) {
  std::vector<std::string> groups;
  for (const HelpOption& option : command.options) {
    if (std::ranges::find(groups, option.group) == groups.end()) groups.push_back(option.group);
  }
  std::string text;
  for (const std::string& group : groups) {
    if (groups.size() > 1) text += fmt::format(".SS {}\n", roff(group));
    for (const HelpOption& option : command.options) {
      if (option.group != group) continue;
      std::vector<std::string> names;
      for (const std::string& name : option.names) names.push_back("\\fB" + roff(name) + "\\fR");
      if (names.empty()) {
        text += fmt::format(".TP\n\\fI{}\\fR\n{}\n", roff(option.placeholder()),
                            roff(option.description));
        continue;
      }
      text += fmt::format(".TP\n{}{}\n{}\n", fmt::join(names, ", "),
                          option.value.empty() ? "" : " " + roff(option.value),
                          roff(option.description));
    }
  }
  return text;
}

}  // namespace

std::string WrappedHelp::make_option_desc(const CLI::Option* option) const {
  constexpr std::size_t kColumns = 100;
  const std::size_t room = kColumns - get_column_width();
  std::istringstream words(option->get_description());
  std::string text;
  std::size_t used = 0;  // of the line under way
  for (std::string word; words >> word;) {
    const bool fits = used + 1 + word.size() <= room;
    if (used > 0) text += fits ? ' ' : '\n';
    used = used > 0 && fits ? used + 1 + word.size() : word.size();
    text += word;
  }
  return text;
}

std::string HelpOption::placeholder() const {
  std::string word = value.substr(0, std::min(value.find(' '), value.find("...")));
  if (word.starts_with('[') && word.ends_with(']')) word = word.substr(1, word.size() - 2);
  return word;
}

bool HelpOption::takes_file() const {
  if (value.find(" or FILE") != std::string::npos) return true;
  return placeholder() == "FILE" || placeholder() == "PATH" || placeholder() == "LIST";
}

bool HelpOption::takes_folder() const { return placeholder() == "DIR" || placeholder() == "MODEL"; }

std::string HelpCommand::name(char between) const {
  return fmt::format("{}", fmt::join(words, std::string(1, between)));
}

std::vector<HelpCommand> help_of(const CLI::App& app) {
  std::vector<HelpCommand> list;
  add_help(app, {}, list);
  return list;
}

std::string bash_completion(std::span<const HelpCommand> commands) {
  std::string enters;    // a word that leads from a command to one below it
  std::string values;    // what may follow an option
  std::string proposes;  // options and commands
  for (const HelpCommand& command : commands) {
    std::vector<std::string> words;
    std::vector<std::string> below;
    std::string argument = ":";
    for (const std::size_t child : command.commands) {
      below.push_back(commands[child].words.back());
      enters += (enters.empty() ? "" : " | ") + bash_case(command, below.back());
    }
    for (const HelpOption& option : command.options) {
      words.insert(words.end(), option.names.begin(), option.names.end());
      if (const std::string kinds = bash_kinds(option); option.argument && !kinds.empty()) {
        argument = fmt::format("COMPREPLY=($(compgen {} -- \"$cur\"))", kinds);
      }
      if (option.value.empty() || option.names.empty()) continue;
      std::string how = ":";  // whatever it is, nobody else knows it
      if (const std::string kinds = bash_kinds(option); !kinds.empty()) {
        how = fmt::format("COMPREPLY=($(compgen {} -- \"$cur\"))", kinds);
      }
      for (const std::string& name : option.names) {
        values += fmt::format("    {}) {}; return ;;\n", bash_case(command, name), how);
      }
    }
    if (!below.empty()) {
      argument = fmt::format("COMPREPLY=($(compgen -W {} -- \"$cur\"))",
                             shell_quoted(fmt::format("{}", fmt::join(below, " "))));
    }
    proposes +=
        fmt::format("    {}) options={}; [[ $cur == -* ]] || {} ;;\n", bash_case(command, ""),
                    shell_quoted(fmt::format("{}", fmt::join(words, " "))), argument);
  }
  return fmt::format(R"(# bash completion for lockstep; made by `lockstep completion bash`.
_lockstep() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command= word options=
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$command $word" in
      {}) command="${{command:+$command }}$word" ;;
    esac
  done
  COMPREPLY=()
  case "$command $prev" in
{}  esac
  case "$command " in
{}  esac
  [[ $cur != -* ]] || COMPREPLY=($(compgen -W "$options" -- "$cur"))
}}
complete -o filenames -F _lockstep lockstep
)",
                     enters, values, proposes);
}

std::string zsh_completion(std::span<const HelpCommand> commands) {
  std::string text = "#compdef lockstep\n# Made by `lockstep completion zsh`.\n\n";
  add_zsh_function(commands, commands[0], text);
  return text +
         "if [ \"$funcstack[1]\" = \"_lockstep\" ]; then\n  _lockstep \"$@\"\nelse\n  compdef "
         "_lockstep lockstep\nfi\n";
}

std::string fish_completion(std::span<const HelpCommand> commands) {
  std::string text = "# Made by `lockstep completion fish`.\ncomplete -c lockstep -f\n";
  for (const HelpCommand& command : commands) {
    std::vector<std::string> below;
    for (const std::size_t child : command.commands) below.push_back(commands[child].words.back());
    // The words that lead to this command are there, and none that leads further.
    std::string here;
    for (std::size_t i = 1; i < command.words.size(); ++i) {
      here += fmt::format("__fish_seen_subcommand_from {}; and ", command.words[i]);
    }
    here += below.empty()
                ? "true"
                : fmt::format("not __fish_seen_subcommand_from {}", fmt::join(below, " "));
    const std::string complete = fmt::format("complete -c lockstep -n {}", shell_quoted(here));
    for (const std::size_t child : command.commands) {
      text += fmt::format("{} -a {} -d {}\n", complete, commands[child].words.back(),
                          shell_quoted(commands[child].description));
    }
    for (const HelpOption& option : command.options) {
      std::string how;
      if (!option.value.empty()) how = " -x";
      if (!option.choices.empty()) {
        how = " -x -a " + shell_quoted(fmt::format("{}", fmt::join(option.choices, " ")));
      }
      if (option.takes_folder()) how = " -x -a '(__fish_complete_directories)'";
      if (option.takes_file()) how = " -r -F" + (option.choices.empty() ? "" : how.substr(3));
      std::string names;
      for (const std::string& name : option.names) {
        names += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      }
      if (!names.empty()) {
        text +=
            fmt::format("{}{}{} -d {}\n", complete, names, how, shell_quoted(option.description));
      }
      if (!option.argument) continue;
      if (option.takes_file()) {
        text += complete + " -F\n";
      } else if (!how.empty()) {
        text += complete + how.substr(3) + "\n";  // without -x, which is for values of options
      }
    }
  }
  return text;
}

std::string man_page(std::span<const HelpCommand> commands, const HelpCommand& command) {
  std::string title = command.name('-');
  std::ranges::transform(title, title.begin(),
                         [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  std::string text =
      fmt::format(".TH {} 1 \"\" \"lockstep {}\" \"User Commands\"\n", roff(title), version());
  text += fmt::format(".SH NAME\n{} \\- {}\n", roff(command.name('-')), roff(command.description));
  text += fmt::format(".SH SYNOPSIS\n\\fB{}\\fR [\\fIOPTIONS\\fR]", roff(command.name()));
  for (const HelpOption& option : command.options) {
    if (!option.argument) continue;
    const std::string word = fmt::format("\\fI{}\\fR", roff(option.placeholder()));
    text += option.required ? " " + word : " [" + word + "]";
  }
  if (!command.commands.empty()) text += " \\fICOMMAND\\fR";
  text += "\n";
  if (!command.explanation.empty()) {
    text += ".SH DESCRIPTION\n" + roff_paragraphs(command.explanation);
  }
  if (!command.commands.empty()) text += ".SH COMMANDS\n";
  for (const std::size_t below : command.commands) {
    text += fmt::format(".TP\n\\fB{}\\fR(1)\n{}\n", roff(commands[below].name('-')),
                        roff(commands[below].description));
  }
  text += ".SH OPTIONS\n" + roff_options(command);
  if (command.words.size() > 1) text += ".SH SEE ALSO\n\\fBlockstep\\fR(1)\n";
  return text;
}

}  // namespace lockstep::cli
