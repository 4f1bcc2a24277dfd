#include "lockstep/base/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstring>

#include "lockstep/base/utf8.h"

namespace lockstep {

std::string list_of(const std::vector<std::string>& items, std::string_view separator) {
  std::string text;
  for (const std::string& item : items) {
    if (!text.empty()) text += separator;
    text += item;
  }
  return text;
}

namespace {

// Appends UTF-8 to what is shown.
void append_visible(std::string& shown, std::string_view text) {
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
}

}  // namespace

std::string visible(std::string_view text) {
  std::string shown;
  // A terminal that does not take UTF-8 would see control characters in other bytes, too.
  while (const auto bad = find_not_utf8(text)) {
    append_visible(shown, text.substr(0, *bad));
    shown += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[*bad]));
    text.remove_prefix(*bad + 1);
  }
  append_visible(shown, text);
  return shown;
}

std::string shell_word(const std::string& text) {
  const auto plain = [](char c) {
    const auto code = static_cast<unsigned char>(c);
    return std::isalnum(code) != 0 || code >= 0x80 || std::strchr("_-+=:,.@%/", c) != nullptr;
  };
  if (!text.empty() && std::ranges::all_of(text, plain)) return text;
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string format_duration(Deadline::Clock::duration duration) {
  const auto count = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
  return count % 1000 == 0 ? fmt::format("{}s", count / 1000) : fmt::format("{}ms", count);
}

}  // namespace lockstep
