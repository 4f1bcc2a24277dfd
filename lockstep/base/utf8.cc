#include "lockstep/base/utf8.h"

#include <cstdint>

namespace lockstep {
namespace {

std::uint8_t byte_at(std::string_view text, std::size_t at) {
  return static_cast<std::uint8_t>(text[at]);
}

bool is_continuation(std::uint8_t byte) { return (byte & 0xc0) == 0x80; }

// Bytes of the character that begins `text`, 0 if none does.
std::size_t character_length(std::string_view text) {
  const std::uint8_t first = byte_at(text, 0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xc2 && first < 0xe0   ? 2
                             : first >= 0xe0 && first < 0xf0 ? 3
                             : first >= 0xf0 && first < 0xf5 ? 4
                                                             : 0;
  if (length == 0 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if (!is_continuation(byte_at(text, i))) return 0;
  }
  // The second byte decides about overlong forms, surrogates and the end of Unicode.
  const std::uint8_t second = byte_at(text, 1);
  if (first == 0xe0 && second < 0xa0) return 0;
  if (first == 0xed && second > 0x9f) return 0;
  if (first == 0xf0 && second < 0x90) return 0;
  if (first == 0xf4 && second > 0x8f) return 0;
  return length;
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t length = character_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string_view utf8_prefix(std::string_view text, std::size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && is_continuation(byte_at(text, most))) --most;
  return text.substr(0, most);
}

std::string to_utf8(std::string_view text) {
  std::string valid(text);
  for (std::size_t at = 0; at < valid.size();) {
    const std::size_t length = character_length(std::string_view(valid).substr(at));
    if (length == 0) valid[at] = '?';
    at += length == 0 ? 1 : length;
  }
  return valid;
}

}  // namespace lockstep
