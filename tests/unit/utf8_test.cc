#include "lockstep/base/utf8.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace lockstep::utf8_test {
namespace {

TEST(Utf8, WellFormed) {
  for (const std::string_view text :
       {"", "node-a", "\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf",
        "\xee\x80\x80", "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf", "a\xc3\xa9z"}) {
    EXPECT_TRUE(is_utf8(text)) << text;
    EXPECT_EQ(repair_utf8(text, "?"), text);
  }
  EXPECT_TRUE(is_utf8(std::string_view("\0", 1)));
}

TEST(Utf8, Malformed) {
  const struct {
    std::string_view text, repaired;
  } cases[] = {
      {"\x80", "?"},       // a continuation alone
      {"a\xc3", "a?"},     // cut short
      {"\xc3(", "?("},     // continuation missing
      {"\xc0\xaf", "??"},  // overlong
      {"\xe0\x9f\xbf", "???"},
      {"\xf0\x8f\xbf\xbf", "????"},
      {"\xed\xa0\x80", "???"},       // a surrogate
      {"\xf4\x90\x80\x80", "????"},  // beyond Unicode
      {"\xf5\x80\x80\x80", "????"},
      {"\xff", "?"},
      {"\xe2\x82\xac\xe2\x82", "\xe2\x82\xac??"},  // the first character is whole
  };
  for (const auto& [text, repaired] : cases) {
    EXPECT_FALSE(is_utf8(text)) << repaired;
    EXPECT_EQ(repair_utf8(text, "?"), repaired);
  }
}

TEST(Utf8, PrefixNeverCutsACharacter) {
  const std::string_view text = "a\xe2\x82\xac\xf0\x9f\x98\x80";
  const std::size_t lengths[] = {0, 1, 1, 1, 4, 4, 4, 4, 8, 8};
  for (std::size_t most = 0; most < std::size(lengths); ++most) {
    EXPECT_EQ(utf8_prefix(text, most).size(), lengths[most]) << most;
    EXPECT_TRUE(is_utf8(utf8_prefix(text, most)));
  }
}

TEST(Utf8, WhatIsAndWhatIsNot) {
  for (const char* good : {"", "a", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x99\x82", "\xed\x9f\xbf",
                           "\xf4\x8f\xbf\xbf"}) {
    EXPECT_EQ(find_not_utf8(good), std::nullopt) << good;
  }
  // A lone continuation, overlong forms, a surrogate, beyond U+10FFFF, cut short, not continued.
  for (const char* bad :
       {"\x80", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xe2\x82", "\xe2\x28\xa1"}) {
    EXPECT_EQ(find_not_utf8(std::string("ab") + bad), 2u) << bad;
    EXPECT_EQ(find_not_utf8(std::string("ab") + bad + "cd"), 2u) << bad;
  }
}

TEST(Utf8, WholeCharacters) {
  const std::string text = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82";
  const std::vector<std::size_t> whole = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10};
  for (std::size_t n = 0; n <= text.size(); ++n)
    EXPECT_EQ(whole_characters(text.substr(0, n)), whole[n]) << n;
}

TEST(Utf8, Repaired) {
  EXPECT_EQ(repair_utf8("h\xc3\xa9!"), "h\xc3\xa9!");
  EXPECT_EQ(repair_utf8("\xff\xe2\x82z"), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbdz");
}

}  // namespace
}  // namespace lockstep::utf8_test
