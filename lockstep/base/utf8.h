#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

// UTF-8 as RFC 3629 has it: no stray or missing continuation bytes, no overlong forms, no
// surrogates, nothing above U+10FFFF.

// The position of the first byte that is not part of a character.
std::optional<std::size_t> find_not_utf8(std::string_view text);
inline bool is_utf8(std::string_view text) { return !find_not_utf8(text); }

// The longest prefix of at most `most` bytes that does not end inside a character of `text`.
std::string_view utf8_prefix(std::string_view text, std::size_t most);

// How many bytes of `text` are there without the beginning of a character at its end. For text that
// arrives in pieces.
std::size_t whole_characters(std::string_view text);

// The text with `replacement`, which is U+FFFD unless given, for every byte that is not part of a
// character.
std::string repair_utf8(std::string_view text, std::string_view replacement = "\xef\xbf\xbd");

// Appends the character of that code point, which is no surrogate and at most 0x10ffff.
void append_utf8(std::string& text, std::uint32_t point);

}  // namespace lockstep
