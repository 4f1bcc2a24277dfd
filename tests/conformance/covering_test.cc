// A covering set of all cases on the media that are slower than threads.

#include <gtest/gtest.h>

#include <cstdio>

#include "tests/support/case_lists.h"
#include "tests/support/places.h"

namespace lockstep::test::covering_test {
namespace {

class Covering : public testing::TestWithParam<Place> {};

TEST_P(Covering, Cases) {
  const Place place = GetParam();
  const bool shared_memory =
      place.medium == GroupMedium::kShm || place.medium == GroupMedium::kAuto;
  std::vector<Case> cases = covering_cases(shared_memory ? Sharing::kAll : Sharing::kNone);
  std::erase_if(cases, [&](const Case& c) { return c.world_size != place.world_size; });
  ASSERT_GE(cases.size(), 20U);
  run_cases(place.group(), cases);
  std::printf("%zu cases\n", cases.size());
}

INSTANTIATE_TEST_SUITE_P(All, Covering,
                         testing::ValuesIn(places({GroupMedium::kLocalMessages, GroupMedium::kTcp,
                                                   GroupMedium::kShm},
                                                  kWorldSizes)),
                         place_name);
constexpr int kFew[] = {2, 3, 5};
INSTANTIATE_TEST_SUITE_P(Also, Covering,
                         testing::ValuesIn(places({GroupMedium::kTcpV6, GroupMedium::kTcpRails,
                                                   GroupMedium::kAuto},
                                                  kFew)),
                         place_name);

}  // namespace
}  // namespace lockstep::test::covering_test
