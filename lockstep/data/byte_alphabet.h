#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lockstep {

// The letters with which the files of byte-level BPE write bytes: one visible character per byte,
// itself where it is one, as GPT-2 chose them. A space is "Ġ", a line end "Ċ".

std::string byte_letter(std::uint8_t byte);
// The bytes that the letters stand for; nothing when a character is no such letter.
std::optional<std::string> bytes_of_letters(std::string_view letters);

}  // namespace lockstep
