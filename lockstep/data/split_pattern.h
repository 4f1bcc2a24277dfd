#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "lockstep/data/unicode.h"

namespace lockstep {

// The regular expressions with which families of byte-level BPE cut a text into words. They differ
// in how they treat contractions, the character before a word, digits and line ends.
enum class SplitPattern {
  kNone,    // the text is one word
  kGpt2,    // also `ByteLevel` with `use_regex`
  kLlama3,  // cl100k: at most three digits in a word
  kQwen2,   // one digit in a word
};

// The pattern that is written so; all that is published of these families is known. Nothing: it is
// another one.
std::optional<SplitPattern> parse_split_pattern(std::string_view regex);

// Cuts a text by a pattern. The scanners are written by hand: each word costs time in proportion to
// its length, whatever the text is. Immutable; any thread may call.
class TextSplitter {
 public:
  explicit TextSplitter(SplitPattern pattern) : pattern_(pattern), unicode_(Unicode::get()) {}

  // Where the word that begins at `begin`, which is below the text's size, ends.
  std::size_t word_end(std::string_view text, std::size_t begin) const;

 private:
  std::size_t gpt2_end(std::string_view text, std::size_t begin) const;
  std::size_t cl100k_end(std::string_view text, std::size_t begin, int most_digits) const;
  std::size_t run_end(std::string_view text, std::size_t at, CharacterClass type) const;
  std::size_t space_end(std::string_view text, std::size_t begin, bool to_line_end) const;

  SplitPattern pattern_;
  const Unicode& unicode_;
};

}  // namespace lockstep
