#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <initializer_list>
#include <map>
#include <string>

namespace lockstep::cli {

// An option whose values are the names of an enum's.
template <typename Enum>
CLI::Option* add_choice(CLI::App& command, const std::string& flag, Enum& chosen,
                        const std::string& description, std::initializer_list<Enum> values) {
  std::map<std::string, Enum> names;
  for (const Enum value : values) {
    std::string name(to_string(value));
    names.emplace(name, value);
    std::ranges::replace(name, '-', '_');  // either spelling will do
    names.emplace(name, value);
  }
  const auto choose = [&chosen, names](const std::string& name) { chosen = names.at(name); };
  return command.add_option_function<std::string>(flag, choose, description)
      ->check(CLI::IsMember(names));
}

}  // namespace lockstep::cli
