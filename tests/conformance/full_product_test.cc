// Every collective, count, type, operation, algorithm and root on a group of threads.

#include <gtest/gtest.h>

#include <cstdio>

#include "tests/support/build_kind.h"
#include "tests/support/case_lists.h"
#include "tests/support/places.h"

namespace lockstep::test::full_product_test {
namespace {

class FullProduct : public testing::TestWithParam<Place> {
 protected:
  // A sanitizer makes every case many times slower: there, one in seven.
  static void run(std::vector<Case> cases) {
    if (!kSanitizers.empty()) {
      std::size_t i = 0;
      std::erase_if(cases, [&](const Case&) { return i++ % 7 != 0; });
    }
    run_cases(GetParam().group(), cases);
    RecordProperty("cases", static_cast<int>(cases.size()));
    std::printf("%zu cases\n", cases.size());
  }
};

TEST_P(FullProduct, Reductions) { run(reduction_cases(GetParam().world_size, Sharing::kAll)); }
TEST_P(FullProduct, Moves) { run(move_cases(GetParam().world_size, Sharing::kAll)); }
TEST_P(FullProduct, Nodes) { run(node_cases(GetParam().world_size, Sharing::kAll)); }

INSTANTIATE_TEST_SUITE_P(All, FullProduct,
                         testing::ValuesIn(places({GroupMedium::kLocal}, kWorldSizes)), place_name);

}  // namespace
}  // namespace lockstep::test::full_product_test
