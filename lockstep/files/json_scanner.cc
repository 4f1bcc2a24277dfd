#include "lockstep/files/json_scanner.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/utf8.h"
#include "lockstep/files/mapped_file.h"

namespace lockstep {
namespace {

constexpr int kMostDepth = 64;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

JsonScanner::JsonScanner(std::string path, std::string_view text)
    : path_(std::move(path)), text_(text), end_(text.size()) {}

JsonScanner JsonScanner::at(std::string_view value) const {
  JsonScanner scanner(path_, text_);
  scanner.position_ = static_cast<std::size_t>(value.data() - text_.data());
  scanner.end_ = scanner.position_ + value.size();
  return scanner;
}

void JsonScanner::fail(std::size_t position, const std::string& what) const {
  throw_bad_file(path_, position, what);
}

void JsonScanner::spaces() {
  while (position_ < end_ && (text_[position_] == ' ' || text_[position_] == '\n' ||
                              text_[position_] == '\r' || text_[position_] == '\t')) {
    ++position_;
  }
}

bool JsonScanner::take(char wanted) {
  spaces();
  if (position_ == end_ || text_[position_] != wanted) return false;
  ++position_;
  return true;
}

void JsonScanner::expect(char wanted) {
  if (!take(wanted)) fail(fmt::format("not JSON: '{}' is missing", wanted));
}

char JsonScanner::kind() {
  spaces();
  if (position_ == end_) fail("not JSON: the text ends where a value should be");
  const char first = text_[position_];
  if (!is_digit(first) && std::string_view("{[\"tfn-").find(first) == std::string_view::npos) {
    fail("not JSON: no value begins like this");
  }
  return first;
}

void JsonScanner::nest() {
  if (++depth_ > kMostDepth) fail(fmt::format("nested more than {} deep", kMostDepth));
}

void JsonScanner::object(const std::function<void(const std::string& key)>& member) {
  if (kind() != '{') fail("not an object");
  nest();
  expect('{');
  if (!take('}')) {
    do {
      spaces();
      const std::string key = text();
      expect(':');
      spaces();
      member(key);
    } while (take(','));
    expect('}');
  }
  --depth_;
}

void JsonScanner::list(const std::function<void()>& element) {
  if (kind() != '[') fail("not a list");
  nest();
  expect('[');
  if (!take(']')) {
    do {
      spaces();
      element();
    } while (take(','));
    expect(']');
  }
  --depth_;
}

std::uint32_t JsonScanner::hex4() {
  std::uint32_t value = 0;
  for (int i = 0; i < 4; ++i, ++position_) {
    const char c = position_ < end_ ? text_[position_] : '"';
    const int digit = is_digit(c)            ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
    if (digit < 0) fail("not JSON: four hexadecimal digits are missing");
    value = value * 16 + static_cast<std::uint32_t>(digit);
  }
  return value;
}

std::string JsonScanner::text() {
  if (kind() != '"') fail("not a text");
  const std::size_t begin = position_++;
  std::string value;
  while (true) {
    std::size_t plain = position_;
    while (plain < end_ && text_[plain] != '"' && text_[plain] != '\\' &&
           static_cast<unsigned char>(text_[plain]) >= 0x20) {
      ++plain;
    }
    value.append(text_, position_, plain - position_);
    position_ = plain;
    if (position_ == end_) fail(begin, "not JSON: a text has no end");
    const char c = text_[position_++];
    if (c == '"') return value;
    if (c != '\\') fail(position_ - 1, "not JSON: a control character in a text");
    const char escaped = position_ < end_ ? text_[position_++] : '\0';
    if (escaped == 'u') {
      const std::size_t escape = position_ - 2;
      std::uint32_t point = hex4();
      if (point >= 0xd800 && point < 0xdc00 && text_.substr(position_, 2) == "\\u") {
        position_ += 2;
        const std::uint32_t low = hex4();
        point = low >= 0xdc00 && low < 0xe000 ? 0x10000 + ((point - 0xd800) << 10) + (low - 0xdc00)
                                              : 0xd800;
      }
      if (point >= 0xd800 && point < 0xe000) fail(escape, "half a surrogate pair");
      append_utf8(value, point);
      continue;
    }
    const auto which = std::string_view("\"\\/bfnrt").find(escaped);
    if (escaped == '\0' || which == std::string_view::npos) {
      fail(position_ - 1, "not JSON: an unknown escape in a text");
    }
    value += std::string_view("\"\\/\b\f\n\r\t")[which];
  }
}

void JsonScanner::number() {
  const std::size_t begin = position_;
  const auto digits = [&] {
    if (position_ == end_ || !is_digit(text_[position_])) fail(begin, "not JSON: a bad number");
    while (position_ < end_ && is_digit(text_[position_])) ++position_;
  };
  const auto here = [&](char c) { return position_ < end_ && text_[position_] == c; };
  if (here('-')) ++position_;
  if (here('0')) {
    ++position_;
    if (position_ < end_ && is_digit(text_[position_])) fail(begin, "not JSON: a bad number");
  } else {
    digits();
  }
  if (here('.')) {
    ++position_;
    digits();
  }
  if (here('e') || here('E')) {
    ++position_;
    if (here('-') || here('+')) ++position_;
    digits();
  }
}

std::uint64_t JsonScanner::whole(std::uint64_t most) {
  const char first = kind();
  const std::size_t begin = position_;
  if (!is_digit(first)) fail("not a whole number");
  number();
  std::uint64_t value = 0;
  for (std::size_t i = begin; i < position_; ++i) {
    if (!is_digit(text_[i])) fail(begin, "not a whole number");
    const auto digit = static_cast<std::uint64_t>(text_[i] - '0');
    if (value > (most - std::min(digit, most)) / 10) {
      fail(begin, fmt::format("a number above {}", most));
    }
    value = value * 10 + digit;
  }
  if (value > most) fail(begin, fmt::format("a number above {}", most));
  return value;
}

void JsonScanner::word(std::string_view wanted) {
  if (text_.substr(position_, std::min(wanted.size(), end_ - position_)) != wanted) {
    fail("not JSON: no value begins like this");
  }
  position_ += wanted.size();
}

bool JsonScanner::flag() {
  const char first = kind();
  if (first != 't' && first != 'f') fail("neither true nor false");
  word(first == 't' ? "true" : "false");
  return first == 't';
}

bool JsonScanner::null() {
  if (kind() != 'n') return false;
  word("null");
  return true;
}

std::string_view JsonScanner::skip() {
  const char first = kind();
  const std::size_t begin = position_;
  switch (first) {
    case '{': object([&](const std::string&) { skip(); }); break;
    case '[': list([&] { skip(); }); break;
    case '"': text(); break;
    case 't':
    case 'f': flag(); break;
    case 'n': null(); break;
    default: number();
  }
  return text_.substr(begin, position_ - begin);
}

void JsonScanner::finish() {
  spaces();
  if (position_ != end_) fail("not JSON: something follows the value");
}

}  // namespace lockstep
