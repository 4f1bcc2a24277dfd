#pragma once

#include <fmt/format.h>

#include <string_view>

namespace lockstep {

enum class LogLevel { kInfo, kWarning, kError };

// One line on stderr, written with a single system call so that processes do not mix their lines.
void log_line(LogLevel level, std::string_view text);

template <typename... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  log_line(level, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace lockstep
