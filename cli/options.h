#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/comm/types.h"

namespace lockstep::cli {

// What the options of several subcommands share.

// A check that a value is one of these names, whose error lists them and says which was meant. The
// names may be written with _ for -. It is called kOneOf, and its description lists the names.
inline constexpr const char* kOneOf = "one of";
CLI::Validator one_of(const std::vector<std::string>& names);

// An option whose values are the names of an enum's. `chosen` is of the enum, or an optional of it.
template <typename Enum, typename Chosen>
CLI::Option* add_choice(CLI::App& command, const std::string& flag, Chosen& chosen,
                        const std::string& description, std::initializer_list<Enum> values) {
  std::map<std::string, Enum> names;
  std::vector<std::string> known;
  for (const Enum value : values) {
    std::string name(to_string(value));
    known.push_back(name);
    names.emplace(name, value);
    std::ranges::replace(name, '-', '_');  // either spelling will do
    names.emplace(name, value);
    std::ranges::replace(name, '_', '-');
    names.emplace(name, value);
  }
  const auto choose = [&chosen, names](const std::string& name) { chosen = names.at(name); };
  return command.add_option_function<std::string>(flag, choose, description)->check(one_of(known));
}

// For --tokenizer: one of the names, or a path that is there.
CLI::Validator tokenizer_name();

// Checks of values whose errors are plain words. A whole number may be written as 1e6.
CLI::Validator whole_number(std::int64_t least, std::int64_t most);
CLI::Validator any_seed();
CLI::Validator real_number(double least, double most = std::numeric_limits<double>::max());

// Where an option that takes one value is given again, the last one counts. For all subcommands, to
// be called when they are complete.
void let_the_last_count(CLI::App& app);

// Of the words behind `lockstep help`, one that is no command: a line that says so.
std::optional<std::string> unknown_command(CLI::App& app, const std::vector<std::string>& words);

// Of the words of the command line, an option that has no value, or the name of another option in
// its place, or an empty path: one line that says so. (CLI11 would take that name for the value.)
std::optional<std::string> missing_value(CLI::App& app, const std::vector<std::string>& words);

// Takes the program and its arguments off the words of `command`: from the first on that is neither
// an option nor its value, or all behind a --.
std::vector<std::string> take_program(const CLI::App& command, std::vector<std::string>& words);

// One line that says what is wrong with the command line, and which command or option was meant.
std::string usage_problem(const CLI::App& app, const CLI::ParseError& error);

// --wire-compress: auto, on or off.
void add_wire_compression(CLI::App& command, WireCompression& compression);

// --device: cpu, cuda or auto.
CLI::Option* add_device_option(CLI::App& command, std::string& device);

// --config FILE: a TOML file whose keys are the names of the command's options. What the command
// line gives wins.
CLI::Option* add_options_file(CLI::App& command, std::string& path);

// To be called first in the command's callback: sets the options that the command line did not.
// Throws CLI::ParseError with the file and the key.
void apply_options_file(CLI::App& command, const std::string& path);

// Throws Error{kInvalidArgument} if `option` was given together with one of the others. (CLI11's
// own excludes() would say so in the help, in words that help nobody.)
void refuse_together(const CLI::App& command, const std::string& option,
                     const std::vector<std::string>& others);

// The job's secret: from --token-file, else from `lockstep launch`, else from LOCKSTEP_TOKEN, else
// empty.
std::string token_from(const std::string& file);

std::chrono::nanoseconds duration_of(double seconds);

}  // namespace lockstep::cli
