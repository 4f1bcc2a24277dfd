#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/deadline.h"

namespace lockstep {

// "a, b, c"
std::string list_of(const std::vector<std::string>& items, std::string_view separator = ", ");

// For people to read, whoever wrote it: control characters, and bytes that are no UTF-8, are shown
// as \x1b.
std::string visible(std::string_view text);

// "200ms", "30s"
std::string format_duration(Deadline::Clock::duration duration);

}  // namespace lockstep
