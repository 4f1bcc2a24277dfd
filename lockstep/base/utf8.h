#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lockstep {

// Well-formed UTF-8: no stray or missing continuation bytes, no overlong forms, no surrogates,
// nothing above U+10FFFF.
bool is_utf8(std::string_view text);

// The longest prefix of at most `most` bytes that does not end inside a character of `text`.
std::string_view utf8_prefix(std::string_view text, std::size_t most);

// The text with every byte that is not part of a character replaced by '?'.
std::string to_utf8(std::string_view text);

}  // namespace lockstep
