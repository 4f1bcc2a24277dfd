#pragma once

#include <string>
#include <vector>

#include "lockstep/flight/flight_file.h"
#include "lockstep/flight/flight_story.h"

namespace lockstep {

// Pictures of files with aligned clocks, sorted by rank. Pure.

// The last `window` nanoseconds, two rows for every rank: phases and collectives. Patterns tell
// apart what colours do, and every bar says what it is when it is pointed at.
std::string flight_svg(const std::vector<FlightFile>& files, std::int64_t window);
// One page with the sentences and the picture; nothing is loaded from elsewhere.
std::string flight_html(const std::vector<FlightFile>& files, const FlightStory& story,
                        std::int64_t window);
// All that was recorded, in the trace event format that Perfetto and chrome://tracing open: a
// process per rank, a thread for its phases and one for each group of its collectives.
std::string flight_trace(const std::vector<FlightFile>& files);

// So much that the last steps can be told apart: four times the longest of the last few steps, and
// all of what is still under way.
std::int64_t fitting_window(const std::vector<FlightFile>& files);

}  // namespace lockstep
