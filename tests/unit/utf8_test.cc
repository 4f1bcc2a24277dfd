#include "lockstep/base/utf8.h"

#include <gtest/gtest.h>

namespace lockstep::utf8_test {
namespace {

TEST(Utf8, WellFormed) {
  for (const std::string_view text :
       {"", "node-a", "\x7f", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf",
        "\xee\x80\x80", "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf", "a\xc3\xa9z"}) {
    EXPECT_TRUE(is_utf8(text)) << text;
    EXPECT_EQ(to_utf8(text), text);
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
    EXPECT_EQ(to_utf8(text), repaired);
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

}  // namespace
}  // namespace lockstep::utf8_test
