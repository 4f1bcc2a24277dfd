#include "lockstep/base/random.h"

#include <gtest/gtest.h>

#include <set>

namespace lockstep::random_test {
namespace {

using Counter = std::array<std::uint32_t, 4>;

// The known answers published with Random123.
TEST(Random, PhiloxKnownAnswers) {
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (Counter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (Counter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Counter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

// Same known answers, so that the place of seed, stream and index never moves.
TEST(Random, SeedIsTheKeyAndStreamAndIndexAreTheCounter) {
  EXPECT_EQ(random_u64(0, 0, 0), 0xe169c58d6627e8d5u);
  EXPECT_EQ(random_u64(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
            0x94fdccebd16cfe09u);
}

TEST(Random, NeighboursDiffer) {
  std::set<std::uint64_t> seen;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    for (std::uint64_t stream = 0; stream < 8; ++stream) {
      for (std::uint64_t index = 0; index < 8; ++index) {
        seen.insert(random_u64(seed, stream, index));
      }
    }
  }
  EXPECT_EQ(seen.size(), 512u);
}

TEST(Random, FloatsFillTheUnitIntervalEvenly) {
  EXPECT_EQ(random_f32(0, 0, 0), static_cast<float>(0xe169c5) / static_cast<float>(1 << 24));
  constexpr int kCount = 100000;
  std::array<int, 10> bins{};
  double sum = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const float value = random_f32(1, 2, i);
    ASSERT_GE(value, 0.0f);
    ASSERT_LT(value, 1.0f);
    ++bins[static_cast<std::size_t>(value * 10)];
    sum += value;
  }
  EXPECT_NEAR(sum / kCount, 0.5, 0.005);                          // five sigma: 0.0046
  for (const int bin : bins) EXPECT_NEAR(bin, kCount / 10, 475);  // five sigma
}

}  // namespace
}  // namespace lockstep::random_test
