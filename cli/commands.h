#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace lockstep::cli {

// The job the command line asked for; returns the exit code. Parsing only chooses it, main runs it
// once the whole line is known to be right, so that wrong usage never starts anything.
using Job = std::function<int()>;

// One function per subcommand, each in a file of its own: adds the subcommand with its options to
// `app` and, when it is chosen, sets `job`. Both outlive the parse.

}  // namespace lockstep::cli
