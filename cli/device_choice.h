#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace lockstep::cli {

// --device cpu, cuda or auto.
CLI::Option* add_device_option(CLI::App& command, std::string& device);

// "cpu" or "cuda": what auto means on this machine. Says in one line why it is the CPU.
std::string choose_device(const std::string& device);

}  // namespace lockstep::cli
