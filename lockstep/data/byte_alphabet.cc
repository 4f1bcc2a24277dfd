#include "lockstep/data/byte_alphabet.h"

#include <array>

#include "lockstep/base/utf8.h"
#include "lockstep/data/unicode.h"

namespace lockstep {
namespace {

constexpr std::uint32_t kLetters = 256 + 68;  // code points; 68 bytes are no visible character

struct ByteAlphabet {
  std::array<std::uint32_t, 256> letters = {};
  std::array<std::int32_t, kLetters> bytes = {};  // -1: no letter
};

constexpr ByteAlphabet make_alphabet() {
  ByteAlphabet alphabet;
  for (std::int32_t& byte : alphabet.bytes) byte = -1;
  std::uint32_t next = 256;
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    const bool visible = (byte > ' ' && byte <= '~') || (byte > 0xa0 && byte != 0xad);
    const std::uint32_t letter = visible ? byte : next++;
    alphabet.letters[byte] = letter;
    alphabet.bytes[letter] = static_cast<std::int32_t>(byte);
  }
  return alphabet;
}

constexpr ByteAlphabet kAlphabet = make_alphabet();

}  // namespace

std::string byte_letter(std::uint8_t byte) {
  std::string letter;
  append_utf8(letter, kAlphabet.letters[byte]);
  return letter;
}

std::optional<std::string> bytes_of_letters(std::string_view letters) {
  std::string bytes;
  for (std::size_t at = 0; at < letters.size();) {
    const Character letter = decode_character(letters, at);
    if (letter.point >= kLetters || kAlphabet.bytes[letter.point] < 0) return std::nullopt;
    bytes += static_cast<char>(kAlphabet.bytes[letter.point]);
    at += letter.length;
  }
  return bytes;
}

}  // namespace lockstep
