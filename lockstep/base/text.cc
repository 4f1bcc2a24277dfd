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

std::string visible(std::string_view text) {
  std::string shown;
  unsigned before = 0;
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    // U+0080 to U+009F are control characters as well; in UTF-8 the first byte of each is c2.
    const bool second_row = before == 0xc2 && code >= 0x80 && code < 0xa0;
    if (second_row) shown.pop_back();
    if (code < 0x20 || code == 0x7f || second_row) {
      shown += fmt::format("\\x{:02x}", code);
    } else {
      shown += c;
    }
    before = code;
  }
  return shown;
}

std::string format_duration(Deadline::Clock::duration duration) {
  const auto count = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
  return count % 1000 == 0 ? fmt::format("{}s", count / 1000) : fmt::format("{}ms", count);
}

}  // namespace lockstep
