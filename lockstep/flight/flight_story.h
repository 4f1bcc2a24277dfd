#pragma once

#include <string>
#include <vector>

#include "lockstep/flight/flight_file.h"

namespace lockstep {

// What the files of a generation tell, in sentences. Pure.
struct FlightStory {
  std::vector<std::string> sentences;
  // The ranks that the others waited for, or that failed by themselves; none: nobody stands out.
  std::vector<int> held_up_by;
};

// Puts the times of all files on one clock: that of the host where they come from one; otherwise
// the time since 1970, corrected by what collectives tell of it: they end on all ranks at about the
// same time. Returns the largest correction in nanoseconds.
std::int64_t align_clocks(std::vector<FlightFile>& files);

// Of files with aligned clocks, sorted by rank.
FlightStory tell_flight(const std::vector<FlightFile>& files);

// "3.2 s", "15 ms", "80 us"
std::string short_time(std::int64_t nanoseconds);

}  // namespace lockstep
