#include <gtest/gtest.h>

#include <array>

#include "lockstep/comm/transport/transport.h"

namespace lockstep::layout_test {
namespace {

// Where each byte of the message lies: row, place in the row's memory.
std::vector<std::pair<std::size_t, std::size_t>> places(const Layout& layout) {
  std::vector<std::pair<std::size_t, std::size_t>> all;
  for (std::size_t at = 0; at < layout.bytes();) {
    const std::span<std::byte> part = layout.at(at);
    EXPECT_FALSE(part.empty());
    for (std::byte& byte : part) {
      for (std::size_t row = 0; row < layout.rows.size(); ++row) {
        const auto place = &byte - layout.rows[row];
        if (place >= 0 && place < 100) all.emplace_back(row, place);
      }
    }
    at += part.size();
  }
  return all;
}

class LayoutTest : public testing::Test {
 protected:
  std::array<std::byte, 100> first_;
  std::array<std::byte, 100> padding_;  // keeps the rows apart
  std::array<std::byte, 100> second_;
  std::array<std::byte*, 2> rows_{first_.data(), second_.data()};
};

TEST_F(LayoutTest, OneRow) {
  const Layout layout{std::span(rows_).first(1), 5, 0, 0};
  using Places = std::vector<std::pair<std::size_t, std::size_t>>;
  EXPECT_EQ(layout.bytes(), 5U);
  EXPECT_EQ(layout.at(3).data(), first_.data() + 3);
  EXPECT_EQ(layout.at(3).size(), 2U);
  EXPECT_EQ(places(layout), (Places{{0, 0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}}));
}

TEST_F(LayoutTest, RowsTravelBySegment) {
  const Layout layout{rows_, 5, 2, 0};
  using Places = std::vector<std::pair<std::size_t, std::size_t>>;
  EXPECT_EQ(
      places(layout),
      (Places{{0, 0}, {0, 1}, {1, 0}, {1, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {0, 4}, {1, 4}}));
}

TEST_F(LayoutTest, AWindowIsUsedAgain) {
  const Layout layout{rows_, 7, 2, 2};
  using Places = std::vector<std::pair<std::size_t, std::size_t>>;
  EXPECT_EQ(places(layout), (Places{{0, 0},
                                    {0, 1},
                                    {1, 0},
                                    {1, 1},
                                    {0, 2},
                                    {0, 3},
                                    {1, 2},
                                    {1, 3},
                                    {0, 0},
                                    {0, 1},
                                    {1, 0},
                                    {1, 1},
                                    {0, 2},
                                    {1, 2}}));
}

TEST_F(LayoutTest, EveryOffsetLeadsToItsByte) {
  for (std::size_t row_bytes = 1; row_bytes < 20; ++row_bytes) {
    for (std::size_t segment = 1; segment < 8; ++segment) {
      const Layout layout{rows_, row_bytes, segment, 0};
      const auto all = places(layout);
      ASSERT_EQ(all.size(), layout.bytes());
      for (std::size_t at = 0; at < all.size(); ++at) {
        EXPECT_EQ(layout.at(at).data(), rows_[all[at].first] + all[at].second);
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::layout_test
