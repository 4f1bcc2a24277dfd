#include "lockstep/base/utf8.h"

#include <cstdint>

namespace lockstep {
namespace {

std::uint8_t byte_at(std::string_view text, std::size_t at) {
  return static_cast<std::uint8_t>(text[at]);
}

bool is_continuation(std::uint8_t byte) { return (byte & 0xc0) == 0x80; }

// Bytes of the character that `lead` begins; 0: none does.
std::size_t length_from(std::uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return 2;
  if (lead >= 0xe0 && lead <= 0xef) return 3;
  if (lead >= 0xf0 && lead <= 0xf4) return 4;
  return 0;
}

// Bytes of the character that begins `text`, which is not empty; 0: none does.
std::size_t character_length(std::string_view text) {
  const std::uint8_t lead = byte_at(text, 0);
  const std::size_t length = length_from(lead);
  if (length < 2) return length;
  if (length > text.size()) return 0;
  // The second byte decides about overlong forms, surrogates and the end of Unicode.
  const std::uint8_t second = byte_at(text, 1);
  const std::uint8_t least = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const std::uint8_t most = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (second < least || second > most) return 0;
  for (std::size_t i = 2; i < length; ++i) {
    if (!is_continuation(byte_at(text, i))) return 0;
  }
  return length;
}

}  // namespace

std::optional<std::size_t> find_not_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = character_length(text.substr(at));
    if (length == 0) return at;
    at += length;
  }
  return std::nullopt;
}

std::string_view utf8_prefix(std::string_view text, std::size_t most) {
  if (text.size() <= most) return text;
  while (most > 0 && is_continuation(byte_at(text, most))) --most;
  return text.substr(0, most);
}

std::size_t whole_characters(std::string_view text) {
  // At most three bytes of a character that is not complete can stand at the end.
  for (std::size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const std::uint8_t byte = byte_at(text, text.size() - back);
    if (is_continuation(byte)) continue;
    return length_from(byte) > back ? text.size() - back : text.size();
  }
  return text.size();
}

std::string repair_utf8(std::string_view text, std::string_view replacement) {
  std::string repaired;
  while (const auto bad = find_not_utf8(text)) {
    repaired.append(text.substr(0, *bad)).append(replacement);
    text.remove_prefix(*bad + 1);
  }
  return repaired.append(text);
}

void append_utf8(std::string& text, std::uint32_t point) {
  const auto put = [&](std::uint32_t byte) { text += static_cast<char>(byte); };
  if (point < 0x80) {
    put(point);
    return;
  }
  if (point < 0x800) {
    put(0xc0 | point >> 6);
  } else {
    if (point < 0x10000) {
      put(0xe0 | point >> 12);
    } else {
      put(0xf0 | point >> 18);
      put(0x80 | (point >> 12 & 0x3f));
    }
    put(0x80 | (point >> 6 & 0x3f));
  }
  put(0x80 | (point & 0x3f));
}

}  // namespace lockstep
