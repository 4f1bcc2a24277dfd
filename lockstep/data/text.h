#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "lockstep/files/mapped_file.h"

namespace lockstep {

// The position of the first byte that is not UTF-8 (RFC 3629: no surrogates, nothing overlong).
std::optional<std::size_t> find_not_utf8(std::string_view text);

// The bytes of `text` that a whole number of characters make up, for text that arrives in pieces.
std::size_t whole_characters(std::string_view text);

// The same with U+FFFD for every byte that is not UTF-8, for showing to people.
std::string repair_utf8(std::string_view text);

// The text of a file. Throws Error{kIo} with the position where it is empty, not UTF-8, or has a
// zero byte, which ends documents.
std::string_view text_of(const MappedFile& file);

}  // namespace lockstep
