#include "lockstep/data/split_pattern.h"

namespace lockstep {
namespace {

// The end of 's 't 're 've 'm 'll 'd after the apostrophe at `begin`; `begin` when it is none.
// Without case ſ is an s, as Unicode folds it.
std::size_t contraction_end(std::string_view text, std::size_t begin, bool any_case) {
  const auto letter = [&](std::size_t at) {
    const char c = at < text.size() ? text[at] : '\0';
    return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  };
  const char first = letter(begin + 1);
  const char second = letter(begin + 2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return begin + 2;
  if (any_case && first == '\xc5' && second == '\xbf') return begin + 3;
  if ((first == 'r' || first == 'v') && second == 'e') return begin + 3;
  return first == 'l' && second == 'l' ? begin + 3 : begin;
}

}  // namespace

std::optional<SplitPattern> parse_split_pattern(std::string_view regex) {
  struct Known {
    std::string_view regex;
    SplitPattern pattern;
  };
  // tiktoken writes cl100k with possessive quantifiers and one line end; it means the same.
  static constexpr Known kKnown[] = {
      {R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
       SplitPattern::kGpt2},
      {R"('(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
       SplitPattern::kGpt2},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       SplitPattern::kLlama3},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+)",
       SplitPattern::kLlama3},
      {R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
       SplitPattern::kQwen2},
  };
  for (const Known& known : kKnown) {
    if (known.regex == regex) return known.pattern;
  }
  return std::nullopt;
}

std::size_t TextSplitter::word_end(std::string_view text, std::size_t begin) const {
  switch (pattern_) {
    case SplitPattern::kNone: break;
    case SplitPattern::kGpt2: return gpt2_end(text, begin);
    case SplitPattern::kLlama3: return cl100k_end(text, begin, 3);
    case SplitPattern::kQwen2: return cl100k_end(text, begin, 1);
  }
  return text.size();
}

// The end of the characters of one class from `at` on.
std::size_t TextSplitter::run_end(std::string_view text, std::size_t at,
                                  CharacterClass type) const {
  while (at < text.size()) {
    const Character character = unicode_.read(text, at);
    if (character.type != type) break;
    at += character.length;
  }
  return at;
}

// \s+(?!\S)|\s+ : space leaves its last character to the word that follows, unless it is the only
// one. With \s*[\r\n]+ before that (`to_line_end`) it ends with its last line end, if it has one.
std::size_t TextSplitter::space_end(std::string_view text, std::size_t begin,
                                    bool to_line_end) const {
  std::size_t end = begin;
  std::size_t last = begin;      // where the last character begins
  std::size_t line_end = begin;  // after the last line end
  while (end < text.size()) {
    const Character character = unicode_.read(text, end);
    if (character.type != CharacterClass::kSpace) break;
    last = end;
    end += character.length;
    if (character.is_line_end()) line_end = end;
  }
  if (to_line_end && line_end > begin) return line_end;
  return end < text.size() && last > begin ? last : end;
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
std::size_t TextSplitter::gpt2_end(std::string_view text, std::size_t begin) const {
  if (text[begin] == '\'') {
    if (const std::size_t end = contraction_end(text, begin, false); end > begin) return end;
  }
  std::size_t body = begin;
  Character first = unicode_.read(text, begin);
  if (first.point == ' ' && begin + 1 < text.size()) first = unicode_.read(text, ++body);
  if (first.type != CharacterClass::kSpace) return run_end(text, body + first.length, first.type);
  return space_end(text, begin, false);
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|
// \s*[\r\n]+|\s+(?!\S)|\s+
std::size_t TextSplitter::cl100k_end(std::string_view text, std::size_t begin,
                                     int most_digits) const {
  if (text[begin] == '\'') {
    if (const std::size_t end = contraction_end(text, begin, true); end > begin) return end;
  }
  const Character first = unicode_.read(text, begin);
  std::size_t end = begin + first.length;
  if (first.type == CharacterClass::kLetter) return run_end(text, end, CharacterClass::kLetter);
  if (first.type == CharacterClass::kNumber) {
    for (int digits = 1; digits < most_digits && end < text.size(); ++digits) {
      const Character next = unicode_.read(text, end);
      if (next.type != CharacterClass::kNumber) break;
      end += next.length;
    }
    return end;
  }
  const Character next =
      end < text.size() ? unicode_.read(text, end) : Character{.type = CharacterClass::kSpace};
  if (next.type == CharacterClass::kLetter && !first.is_line_end()) {
    return run_end(text, end + next.length, CharacterClass::kLetter);
  }
  if (first.type == CharacterClass::kOther ||
      (first.point == ' ' && next.type == CharacterClass::kOther)) {
    end = run_end(text, end, CharacterClass::kOther);
    while (end < text.size() && (text[end] == '\n' || text[end] == '\r')) ++end;
    return end;
  }
  return space_end(text, begin, true);
}

}  // namespace lockstep
