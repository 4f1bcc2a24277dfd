#include "lockstep/data/text.h"

#include <fmt/format.h>

namespace lockstep {
namespace {

// Bytes of the character that `lead` begins; 0: none does.
std::size_t length_from(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return 2;
  if (lead >= 0xe0 && lead <= 0xef) return 3;
  if (lead >= 0xf0 && lead <= 0xf4) return 4;
  return 0;
}

// Whether the second byte is one that may follow `lead`: it also rules out overlong forms,
// surrogates and what is beyond U+10FFFF.
bool second_fits(unsigned char lead, unsigned char second) {
  const unsigned char least = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const unsigned char most = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  return second >= least && second <= most;
}

}  // namespace

std::optional<std::size_t> find_not_utf8(std::string_view text) {
  std::size_t i = 0;
  while (i < text.size()) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const std::size_t length = length_from(lead);
    if (length == 0 || length > text.size() - i) return i;
    for (std::size_t k = 1; k < length; ++k) {
      const auto byte = static_cast<unsigned char>(text[i + k]);
      if (k == 1 ? !second_fits(lead, byte) : (byte & 0xc0) != 0x80) return i;
    }
    i += length;
  }
  return std::nullopt;
}

std::size_t whole_characters(std::string_view text) {
  // At most three bytes of a character that is not complete can stand at the end.
  for (std::size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xc0) == 0x80) continue;
    return length_from(byte) > back ? text.size() - back : text.size();
  }
  return text.size();
}

std::string repair_utf8(std::string_view text) {
  std::string repaired;
  while (const auto bad = find_not_utf8(text)) {
    repaired.append(text.substr(0, *bad)).append("\xef\xbf\xbd");
    text.remove_prefix(*bad + 1);
  }
  return repaired.append(text);
}

std::string_view text_of(const MappedFile& file) {
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              file.bytes().size());
  if (text.empty()) throw_bad_file(file.path(), "the file is empty");
  if (const auto position = find_not_utf8(text)) {
    throw_bad_file(
        file.path(), *position,
        fmt::format("0x{:02x} is not UTF-8 here", static_cast<unsigned char>(text[*position])));
  }
  if (const auto position = text.find('\0'); position != std::string_view::npos) {
    throw_bad_file(file.path(), position, "a zero byte, which ends documents, is not text");
  }
  return text;
}

}  // namespace lockstep
