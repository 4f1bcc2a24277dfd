#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep {

// "a, b, c"
std::string list_of(const std::vector<std::string>& items, std::string_view separator = ", ");

// "200ms", "30s"
std::string format_duration(Deadline::Clock::duration duration);

}  // namespace lockstep
