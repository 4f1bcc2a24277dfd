#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace lockstep {

enum class LogLevel { kInfo, kWarning, kError };

// One line on stderr, written with a single system call so that processes do not mix their lines.
// A progress bar on the line is cleared first. A line may quote what came from elsewhere: control
// characters are shown, as visible() does, so that nobody can forge a line of ours.
void log_line(LogLevel level, std::string_view text);

// Whether a progress bar stands on the last line of stderr. Returns whether one did before. Any
// thread.
bool set_bar_open(bool open);

// To standard output, at once, for a run whose result is elsewhere: what cannot be written is told
// of once and is no reason to fail, and a reader that has gone is not even told of.
void print_text(const std::string& text);

template <typename... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  log_line(level, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace lockstep
