#pragma once

#include <fmt/format.h>

#include <string_view>

namespace lockstep {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Lines below this level are dropped. Set once, early in main; kInfo unless told.
void set_log_level(LogLevel level);
LogLevel log_level();

// One line on stderr, written with a single system call so that processes do not mix their lines.
void log_line(LogLevel level, std::string_view text);

template <typename... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
  if (level >= log_level()) log_line(level, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace lockstep
