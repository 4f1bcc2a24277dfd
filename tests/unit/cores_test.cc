#include "lockstep/base/cores.h"

#include <gtest/gtest.h>

namespace lockstep::cores_test {
namespace {

using Cores = std::vector<int>;

TEST(Cores, ListsAreWrittenAndCounted) {
  EXPECT_EQ(core_list(Cores{0, 1, 2, 3, 8}), "0-3,8");
  EXPECT_EQ(core_list(Cores{5}), "5");
  EXPECT_EQ(core_list(Cores{}), "");
  const std::vector<std::string> apart{"0-3,8", "5"};
  EXPECT_EQ(count_cores(apart), 6);
  const std::vector<std::string> same{"0-3", "0-3", "2-5"};
  EXPECT_EQ(count_cores(same), 6);
  EXPECT_EQ(count_cores({}), 0);
}

TEST(Cores, MalformedListsCountForNothing) {
  for (const char* text : {"x", "-", "3-", "3-1", "-5", "1-99999999999", "4294967296"}) {
    const std::vector<std::string> lists{text, "7"};
    EXPECT_EQ(count_cores(lists), 1) << text;
  }
}

TEST(Cores, SharesAreDisjointAndComplete) {
  const Cores cores{0, 1, 2, 3, 6, 7, 8};
  for (int ranks = 1; ranks <= 7; ++ranks) {
    Cores all;
    for (int rank = 0; rank < ranks; ++rank) {
      const Cores share = share_of_cores(cores, rank, ranks);
      EXPECT_GE(share.size(), cores.size() / static_cast<std::size_t>(ranks));
      all.insert(all.end(), share.begin(), share.end());
    }
    EXPECT_EQ(all, cores);
  }
  EXPECT_EQ(share_of_cores(cores, 3, 8), cores);
  const Cores two{4, 5};
  EXPECT_EQ(share_of_cores(two, 1, 4), Cores{4});
  EXPECT_EQ(share_of_cores(two, 2, 4), Cores{5});
}

TEST(Cores, ThisProcessHasSome) {
  EXPECT_GE(available_cores(), 1);
  const std::vector<std::string> own{core_list(own_cores())};
  EXPECT_EQ(count_cores(own), available_cores());
}

}  // namespace
}  // namespace lockstep::cores_test
