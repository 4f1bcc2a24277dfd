#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lockstep/page/document.h"

namespace lockstep {

// The plots of a report as pictures for papers and slides, light and without a script: the same
// curves that the page draws (page/plots.json says which), each with dashes of its own, and a bar
// of phases for every rank. Names without ".svg", and the files.
std::vector<std::pair<std::string, std::string>> svg_plots(const std::vector<ReportedRun>& runs);

}  // namespace lockstep
