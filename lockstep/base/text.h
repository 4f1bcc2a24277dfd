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

// A word of a command that is shown to be typed: in quotes where a shell would take it apart.
std::string shell_word(const std::string& text);

// "200ms", "30s"
std::string format_duration(Deadline::Clock::duration duration);

}  // namespace lockstep
