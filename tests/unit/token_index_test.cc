#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "lockstep/model/batch.h"

namespace lockstep::token_index_test {
namespace {

using ::testing::ElementsAre;

TEST(TokenIndex, SortsPlacesByTokenInOrder) {
  const std::vector<std::int32_t> tokens = {3, 0, 3, 1, 3, 0};
  std::vector<std::uint32_t> begin(6, 99), places(tokens.size(), 99);
  index_tokens(tokens, begin, places);
  EXPECT_THAT(begin, ElementsAre(0, 2, 3, 3, 6, 6));
  EXPECT_THAT(places, ElementsAre(1, 5, 3, 0, 2, 4));
}

TEST(TokenIndex, TakesNoTokens) {
  std::vector<std::uint32_t> begin(3, 99);
  index_tokens({}, begin, {});
  EXPECT_THAT(begin, ElementsAre(0, 0, 0));
}

}  // namespace
}  // namespace lockstep::token_index_test
