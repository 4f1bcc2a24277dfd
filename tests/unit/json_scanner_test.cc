#include "lockstep/files/json_scanner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lockstep/base/error.h"

namespace lockstep::json_scanner_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string problem_of(std::string_view text) {
  JsonScanner scanner("f.json", text);
  try {
    scanner.skip();
    scanner.finish();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    return error.what();
  }
  return "no error";
}

TEST(JsonScanner, ReadsEveryKindOfValue) {
  JsonScanner scanner(
      "f", R"( {"a": [1, 20, "x"], "b": {"c": true}, "d": null, "e": false, "n": -1.5e+3} )");
  std::vector<std::string> keys;
  std::vector<std::uint64_t> numbers;
  std::string last;
  scanner.object([&](const std::string& key) {
    keys.push_back(key);
    if (key == "a") {
      scanner.list([&] {
        if (scanner.kind() == '"') {
          last = scanner.text();
        } else {
          numbers.push_back(scanner.whole(20));
        }
      });
    } else if (key == "b") {
      EXPECT_EQ(scanner.skip(), R"({"c": true})");
    } else if (key == "d") {
      EXPECT_TRUE(scanner.null());
    } else if (key == "e") {
      EXPECT_FALSE(scanner.null());
      EXPECT_FALSE(scanner.flag());
    } else {
      EXPECT_EQ(scanner.skip(), "-1.5e+3");
    }
  });
  scanner.finish();
  EXPECT_THAT(keys, ElementsAre("a", "b", "d", "e", "n"));
  EXPECT_THAT(numbers, ElementsAre(1u, 20u));
  EXPECT_EQ(last, "x");
}

TEST(JsonScanner, TextsWithEscapes) {
  const auto text = [](std::string_view json) { return JsonScanner("f", json).text(); };
  EXPECT_EQ(text(R"("a\"\\\/\b\f\n\r\tz")"), "a\"\\/\b\f\n\r\tz");
  EXPECT_EQ(text(R"("\u0041\u00e9\u20AC\ud83d\ude42")"), "A\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82");
  EXPECT_EQ(text("\"\xc3\xa9\""), "\xc3\xa9");
  EXPECT_EQ(text(R"("\u0000")"), std::string(1, '\0'));
}

TEST(JsonScanner, AValueReadAgainKeepsItsPlaceInMessages) {
  const std::string_view text = R"({"a": 1, "b": [1, x]})";
  JsonScanner scanner("f.json", text);
  EXPECT_THROW(scanner.object([&](const std::string&) { scanner.skip(); }), Error);
  const std::string_view good = R"({"a": 1, "b": [1, "x"]})";
  JsonScanner whole("f.json", good);
  std::string_view list;
  whole.object([&](const std::string&) { list = whole.skip(); });
  JsonScanner part = whole.at(list);
  try {
    part.list([&] { part.whole(9); });
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("18"));
    EXPECT_THAT(error.what(), HasSubstr("f.json"));
  }
}

TEST(JsonScanner, RefusesWhatIsNoJson) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[",
                           "[1",
                           "[1,]",
                           "[1 2]",
                           "{\"a\"}",
                           "{\"a\":}",
                           "{\"a\":1,}",
                           "{a:1}",
                           "tru",
                           "nul",
                           "+1",
                           "01",
                           "1.",
                           ".5",
                           "1e",
                           "-",
                           "\"",
                           "\"a",
                           "\"\\x\"",
                           "\"\\u12g4\"",
                           "\"\\u12\"",
                           "\"\\ud800\"",
                           "\"\\udc00\"",
                           "\"\\ud800\\u0041\"",
                           "\"\n\"",
                           "1 2",
                           "[1]]",
                           "\"\\",
                           "'a'"}) {
    EXPECT_THAT(problem_of(text), HasSubstr("f.json")) << text;
  }
  EXPECT_EQ(problem_of("[0, -0.5, {\"a\": []}, {}]"), "no error");
}

TEST(JsonScanner, DepthAndNumbersHaveLimits) {
  EXPECT_EQ(problem_of(std::string(64, '[') + std::string(64, ']')), "no error");
  EXPECT_THAT(problem_of(std::string(65, '[') + std::string(65, ']')), HasSubstr("deep"));
  EXPECT_THAT(problem_of(std::string(1 << 20, '[')), HasSubstr("deep"));
  EXPECT_EQ(JsonScanner("f", "255").whole(255), 255u);
  EXPECT_THROW(JsonScanner("f", "256").whole(255), Error);
  EXPECT_THROW(JsonScanner("f", "9").whole(5), Error);
  EXPECT_THROW(JsonScanner("f", "99999999999999999999999").whole(UINT64_MAX), Error);
  EXPECT_EQ(JsonScanner("f", "18446744073709551615").whole(UINT64_MAX), UINT64_MAX);
  EXPECT_THROW(JsonScanner("f", "18446744073709551616").whole(UINT64_MAX), Error);
  EXPECT_THROW(JsonScanner("f", "1.0").whole(5), Error);
  EXPECT_THROW(JsonScanner("f", "-1").whole(5), Error);
}

}  // namespace
}  // namespace lockstep::json_scanner_test
