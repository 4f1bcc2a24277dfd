#include "lockstep/base/text.h"

#include <fmt/format.h>

namespace lockstep {

std::string list_of(const std::vector<std::string>& items, std::string_view separator) {
  std::string text;
  for (const std::string& item : items) {
    if (!text.empty()) text += separator;
    text += item;
  }
  return text;
}

std::string format_duration(Deadline::Clock::duration duration) {
  const auto count = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
  return count % 1000 == 0 ? fmt::format("{}s", count / 1000) : fmt::format("{}ms", count);
}

}  // namespace lockstep
