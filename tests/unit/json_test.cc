#include "lockstep/files/json.h"

#include <gtest/gtest.h>

namespace lockstep::json_test {
namespace {

TEST(Json, WritesTextsThatAreNoUtf8) {
  const Json json = {{"host", "n\xff"}};
  EXPECT_EQ(to_text(json), "{\"host\":\"n\xef\xbf\xbd\"}");
}

TEST(Json, AWholeNumberIsOneInItsRange) {
  EXPECT_EQ(whole<std::int64_t>(parse_json("-3")), -3);
  EXPECT_EQ(whole<std::uint64_t>(parse_json("18446744073709551615")), UINT64_MAX);
  EXPECT_EQ(whole<std::uint8_t>(parse_json("255")), 255);
  EXPECT_EQ(whole<int>(parse_json("-1"), -1), -1);
  for (const char* text :
       {"1.5", "1e300", "1e2", "\"1\"", "[1]", "true", "null", "", "18446744073709551615"}) {
    EXPECT_FALSE(whole<std::int64_t>(parse_json(text))) << text;
  }
  EXPECT_FALSE(whole<std::uint8_t>(parse_json("256")));
  EXPECT_FALSE(whole<std::uint32_t>(parse_json("-1")));
  EXPECT_FALSE(whole<int>(parse_json("-2"), -1));
  EXPECT_FALSE(whole<int>(parse_json("8"), 0, 7));
}

TEST(Json, AListOfWholeNumbersHasNothingElse) {
  EXPECT_EQ(wholes<std::int64_t>(parse_json("[]")), std::vector<std::int64_t>());
  EXPECT_EQ(wholes<std::int64_t>(parse_json("[1,2]")), (std::vector<std::int64_t>{1, 2}));
  for (const char* text : {"", "7", "{\"a\":1}", "[1,2.5]", "[-1]", "[[1]]"}) {
    EXPECT_FALSE(wholes<std::int64_t>(parse_json(text), 0)) << text;
  }
}

}  // namespace
}  // namespace lockstep::json_test
