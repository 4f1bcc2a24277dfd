#pragma once

#include <CLI/CLI.hpp>

namespace lockstep::cli {

// Adds --config FILE: a TOML file whose keys are the names of the command's options. What the
// command line gives wins.
CLI::Option* add_options_file(CLI::App& command, std::string& path);

// To be called first in the command's callback: sets the options that the command line did not.
// Throws CLI::ParseError with the file and the key.
void apply_options_file(CLI::App& command, const std::string& path);

}  // namespace lockstep::cli
