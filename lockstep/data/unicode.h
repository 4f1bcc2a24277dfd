#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// What the patterns of tokenizers know of a character: \p{L}, \p{N}, \s, or none of them.
enum class CharacterClass : std::uint8_t { kOther, kLetter, kNumber, kSpace };

struct Character {
  std::uint32_t point = 0;   // kNoPoint for a byte that is part of none
  std::uint32_t length = 1;  // in bytes
  CharacterClass type = CharacterClass::kOther;

  bool is_line_end() const { return point == '\n' || point == '\r'; }
};

// Letters and numbers of Unicode 16.0 and canonical composition (NFC) of Unicode 9.0, as Hugging
// Face's `tokenizers` has them. Immutable; any thread may call.
class Unicode {
 public:
  static const Unicode& get();

  // The character at `at`, which is below the text's size.
  Character read(std::string_view text, std::size_t at) const;

  // The text in NFC: `text` itself, or `storage` when it differs. Bytes that are no UTF-8 stay.
  std::string_view nfc(std::string_view text, std::string& storage) const;

 private:
  static constexpr std::uint8_t kClassBits = 3;
  static constexpr std::uint8_t kUnstable = 4;  // NFC may change it or what stands before it

  Unicode();
  std::uint8_t flags(std::uint32_t point) const {
    return point < flags_.size() ? flags_[point] : 0;
  }
  void append_nfc(std::string_view text, std::string& out) const;

  std::vector<std::uint8_t> flags_;  // by code point
};

constexpr std::uint32_t kNoPoint = UINT32_MAX;

// The code point at `at`, which is below the text's size; kNoPoint with length 1 for a byte that is
// part of none.
inline Character decode_character(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[at + i]); };
  const std::uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::uint32_t length = lead < 0xc2 ? 1 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  if (length == 1 || lead > 0xf4 || length > text.size() - at) return {kNoPoint, 1};
  std::uint32_t point = lead & (0x7f >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {kNoPoint, 1};
    point = point << 6 | (byte(i) & 0x3f);
  }
  const bool overlong = (length == 3 && point < 0x800) || (length == 4 && point < 0x10000);
  if (overlong || point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) return {kNoPoint, 1};
  return {point, length};
}

inline Character Unicode::read(std::string_view text, std::size_t at) const {
  Character character = decode_character(text, at);
  character.type = static_cast<CharacterClass>(flags(character.point) & kClassBits);
  return character;
}

}  // namespace lockstep
