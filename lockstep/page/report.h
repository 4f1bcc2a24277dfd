#pragma once

#include <string>
#include <vector>

namespace lockstep {

// The folders of runs that are named: each itself, if it has a metrics.jsonl, or those in it that
// have one. Throws Error{kInvalidArgument} for a folder without any.
std::vector<std::string> find_runs(const std::vector<std::string>& folders);

// Writes report.html, which needs no other file, and each plot as an SVG to the folder `out`.
// Returns the path of the first. Throws Error{kIo}.
std::string write_report(const std::vector<std::string>& runs, const std::string& out);

}  // namespace lockstep
