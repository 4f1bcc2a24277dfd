#pragma once

#include <string>
#include <vector>

#include "lockstep/page/run_folder.h"

namespace lockstep {

// The page as HTML that needs no other file. One source draws both: the live page asks for its
// data, a report has it inside.
std::string live_document();

// A run of a report.
struct ReportedRun {
  std::string name;
  const RunRecord* record = nullptr;
};
std::string report_document(const std::vector<ReportedRun>& runs);

}  // namespace lockstep
