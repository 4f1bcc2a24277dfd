#include "lockstep/comm/stream_copy.h"

#include <gtest/gtest.h>

#include <vector>

namespace lockstep::stream_copy_test {
namespace {

TEST(StreamBytes, CopiesAtEveryLengthAndAlignment) {
  std::vector<std::byte> from(400);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 167 + 13);
  for (std::size_t shift = 0; shift < 33; ++shift) {
    for (std::size_t size = 0; size + shift < 300; ++size) {
      std::vector<std::byte> to(from.size(), std::byte{0x5a});
      std::vector<std::byte> expected = to;
      stream_bytes(to.data() + shift, from.data() + 7, size);
      std::copy_n(from.begin() + 7, size, expected.begin() + static_cast<std::ptrdiff_t>(shift));
      ASSERT_EQ(to, expected) << shift << " + " << size;
    }
  }
}

}  // namespace
}  // namespace lockstep::stream_copy_test
