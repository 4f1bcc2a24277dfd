#include "lockstep/base/hash/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>
#include <vector>

namespace lockstep::crc32c_test {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

TEST(Crc32c, CheckValue) {
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xe3069283u);
  EXPECT_EQ(crc32c_portable(bytes_of("123456789")), 0xe3069283u);
}

// The iSCSI examples of RFC 3720, appendix B.4.
TEST(Crc32c, IscsiExamples) {
  std::vector<std::byte> bytes(32, std::byte{0});
  EXPECT_EQ(crc32c(bytes), 0x8a9136aau);
  bytes.assign(32, std::byte{0xff});
  EXPECT_EQ(crc32c(bytes), 0x62a8ab43u);
  for (std::size_t i = 0; i < 32; ++i) bytes[i] = static_cast<std::byte>(i);
  EXPECT_EQ(crc32c(bytes), 0x46dd794eu);
}

TEST(Crc32c, NothingIsZero) { EXPECT_EQ(crc32c({}), 0u); }

TEST(Crc32c, InstructionAndTableAgreeAtEveryLengthAndAlignment) {
  std::vector<std::byte> bytes(300);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 167 + 13);
  for (std::size_t start = 0; start < 9; ++start) {
    for (std::size_t size = 0; start + size <= bytes.size(); ++size) {
      const auto part = std::span(bytes).subspan(start, size);
      ASSERT_EQ(crc32c(part), crc32c_portable(part)) << start << " + " << size;
    }
  }
}

TEST(Crc32c, CopiesWhatItSums) {
  std::vector<std::byte> bytes(20'000);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(i * 167 + i / 256);
  }
  for (const std::size_t size : {0, 1, 8, 191, 192, 200, 3071, 3072, 3080, 6144, 16384, 19'991}) {
    for (std::size_t start = 0; start < 9; ++start) {
      const auto part = std::span(bytes).subspan(start, size);
      const std::uint32_t expected = crc32c_portable(part, 77);
      EXPECT_EQ(crc32c(part, 77), expected) << start << " + " << size;
      std::vector<std::byte> copy(size + 1, std::byte{0x5a});
      EXPECT_EQ(crc32c_copy(copy.data(), part, 77), expected) << start << " + " << size;
      EXPECT_TRUE(std::equal(part.begin(), part.end(), copy.begin())) << start << " + " << size;
      EXPECT_EQ(copy.back(), std::byte{0x5a});
    }
  }
}

TEST(Crc32c, PiecesGiveTheWhole) {
  const auto bytes = bytes_of("The quick brown fox jumps over the lazy dog");
  for (std::size_t cut = 0; cut <= bytes.size(); ++cut) {
    const auto first = bytes.first(cut), rest = bytes.subspan(cut);
    EXPECT_EQ(crc32c(rest, crc32c(first)), crc32c(bytes)) << cut;
    EXPECT_EQ(crc32c_portable(rest, crc32c_portable(first)), crc32c(bytes)) << cut;
  }
}

}  // namespace
}  // namespace lockstep::crc32c_test
