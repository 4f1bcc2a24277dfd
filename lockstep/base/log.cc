#include "lockstep/base/log.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

std::string_view prefix(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo: return "";
    case LogLevel::kWarning: return "warning: ";
    case LogLevel::kError: return "error: ";
  }
  return "";
}

constinit std::atomic<bool> bar_open{false};

}  // namespace

bool set_bar_open(bool open) { return bar_open.exchange(open); }

void log_line(LogLevel level, std::string_view text) {
  const std::string line =
      fmt::format("{}{}{}\n", set_bar_open(false) ? "\r\x1b[K" : "", prefix(level), visible(text));
  // A log that cannot be written is no reason to fail.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

void print_text(const std::string& text) {
  if (std::fputs(text.c_str(), stdout) >= 0 && std::fflush(stdout) == 0) return;
  const int error = errno;
  std::clearerr(stdout);
  const bool unread = error == EPIPE || error == EIO;  // EIO: a terminal that is closed
  static std::atomic<bool> told{false};
  if (unread || told.exchange(true)) return;
  log(LogLevel::kWarning, "standard output cannot be written, and what belongs there is lost: {}",
      std::strerror(error));
}

}  // namespace lockstep
