#include "lockstep/wire/compression.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace lockstep::compression_test {
namespace {

using Bytes = std::vector<std::byte>;

// Compresses and checks that the same comes back; the size of the compressed form, 0 if there is
// none.
std::size_t there_and_back(const Bytes& plain) {
  Compressor compressor;
  Decompressor decompressor;
  const auto compressed = compressor.compress(plain);
  if (compressed.empty()) return 0;
  Bytes again(plain.size(), std::byte{0x55});
  // In memory of just its size, so that the sanitizer sees every byte beyond it.
  const Bytes copy(compressed.begin(), compressed.end());
  EXPECT_TRUE(decompressor.decompress(copy, again));
  EXPECT_EQ(again, plain);
  return compressed.size();
}

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  Bytes bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::vector<float> gradient(std::size_t count, unsigned seed = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, 1e-3F);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

Bytes random_bytes(std::size_t count) {
  std::mt19937 generator(7);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(generator());
  return bytes;
}

double share(std::size_t compressed, std::size_t plain) {
  return static_cast<double>(compressed) / static_cast<double>(plain);
}

TEST(Compression, AGradientTakes27BitsOf32) {
  const Bytes plain = bytes_of(gradient(4096));
  const std::size_t size = there_and_back(plain);
  EXPECT_GT(size, 0U);
  EXPECT_LT(share(size, plain.size()), 27.2 / 32);
}

TEST(Compression, InBf16ItTakes11BitsOf16) {
  std::vector<std::uint16_t> values;
  for (const float value : gradient(8192)) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    values.push_back(static_cast<std::uint16_t>(bits >> 16));
  }
  const Bytes plain = bytes_of(values);
  const std::size_t size = there_and_back(plain);
  EXPECT_GT(size, 0U);
  EXPECT_LT(share(size, plain.size()), 11.2 / 16);
}

TEST(Compression, WhereverTheNumbersBegin) {
  for (std::size_t shift = 0; shift < 4; ++shift) {
    for (const std::size_t size : {16384U, 16383U, 5000U, 1027U, 1024U}) {
      const Bytes all = bytes_of(gradient(5000));
      const Bytes plain(all.begin() + static_cast<long>(shift),
                        all.begin() + static_cast<long>(shift + size));
      EXPECT_GT(there_and_back(plain), 0U) << shift << " " << size;
    }
  }
}

TEST(Compression, WhatWouldNotBecomeShorterStaysAsItIs) {
  EXPECT_EQ(there_and_back(random_bytes(16384)), 0U);
  EXPECT_EQ(there_and_back(bytes_of(gradient(255))), 0U) << "too little for a table";
  EXPECT_EQ(there_and_back({}), 0U);
}

TEST(Compression, AllKindsOfBytesComeBack) {
  EXPECT_LT(there_and_back(Bytes(16384)), 13'000U);  // one value in all planes
  EXPECT_LT(there_and_back(Bytes(16384, std::byte{255})), 13'000U);
  std::mt19937 generator(3);
  for (int round = 0; round < 200; ++round) {
    // From one value to all of them, alike or very unlike in frequency, in any one or two planes.
    Bytes plain = random_bytes(4 * (256 + generator() % 3841) + generator() % 4);
    const double skew = 0.05 + static_cast<double>(generator() % 100) / 20;
    std::geometric_distribution<int> geometric(std::min(0.9, skew / 6));
    const std::size_t first = generator() % 4, step = generator() % 2 == 0 ? 2 : 4;
    for (std::size_t i = first; i < plain.size(); i += step) {
      plain[i] = static_cast<std::byte>(std::min(geometric(generator), 255));
    }
    there_and_back(plain);
  }
}

// Frequencies like Fibonacci's numbers make the longest codes of all.
TEST(Compression, CodesThatWouldBeTooLongAreCut) {
  std::vector<std::uint32_t> words;
  std::size_t a = 1, b = 1;
  for (std::uint32_t value = 0; words.size() < 4096; ++value) {
    words.insert(words.end(), std::min(a, 4096 - words.size()), value << 24 | 0x123456U * value);
    a = std::exchange(b, a + b);
  }
  const std::size_t size = there_and_back(bytes_of(words));
  EXPECT_GT(size, 0U);
  // By Huffman the bytes of this plane have 2.6 bits.
  EXPECT_LT(share(size, 16384), 0.84);
}

// docs/mesh_protocol.md has the same: eight words whose highest bytes are 60, 60, 61, 60, 188, 60,
// 60, 61.
TEST(Compression, TestVector) {
  Bytes compressed;
  for (const int byte :
       {0x08, 0x02, 0x3c, 0x3d, 0xbc, 0x21, 0x02, 1, 0, 1, 0, 1, 0, 1, 0, 0x00, 0x01, 0x03, 0x02}) {
    compressed.push_back(static_cast<std::byte>(byte));
  }
  for (int i = 0; i < 24; ++i) compressed.push_back(static_cast<std::byte>(i));
  Bytes plain(32);
  ASSERT_TRUE(Decompressor().decompress(compressed, plain));
  const int high[] = {60, 60, 61, 60, 188, 60, 60, 61};
  for (int i = 0; i < 8; ++i) {
    for (int k = 0; k < 3; ++k) {
      EXPECT_EQ(std::to_integer<int>(plain[static_cast<std::size_t>(4 * i + k)]), 3 * i + k);
    }
    EXPECT_EQ(std::to_integer<int>(plain[static_cast<std::size_t>(4 * i + 3)]), high[i]) << i;
  }
}

TEST(Compression, WhatIsNoCompressedFormIsRefused) {
  const Bytes plain = bytes_of(gradient(1024));
  Compressor compressor;
  const auto span = compressor.compress(plain);
  const Bytes compressed(span.begin(), span.end());
  Decompressor decompressor;
  Bytes again(plain.size());
  ASSERT_TRUE(decompressor.decompress(compressed, again));
  for (std::size_t size = 0; size < compressed.size(); ++size) {
    EXPECT_FALSE(decompressor.decompress(std::span(compressed).first(size), again)) << size;
  }
  Bytes longer = compressed;
  longer.push_back({});
  EXPECT_FALSE(decompressor.decompress(longer, again));
  for (const std::size_t size :
       {std::size_t{0}, plain.size() - 4, plain.size() + 4}) {
    Bytes other(size);
    EXPECT_FALSE(decompressor.decompress(compressed, other)) << size;
  }
  for (const int planes : {0, 3, 0xf, 0x18, 0xff}) {
    Bytes other = compressed;
    other[0] = static_cast<std::byte>(planes);
    EXPECT_FALSE(decompressor.decompress(other, again)) << planes;
  }
  Bytes lengths = compressed;  // of more codes than there can be
  const auto values = 1 + std::to_integer<std::size_t>(lengths[1]);
  for (std::size_t i = 2 + values; i < 2 + values + values / 2; ++i) lengths[i] = std::byte{0x11};
  EXPECT_FALSE(decompressor.decompress(lengths, again));
}

}  // namespace
}  // namespace lockstep::compression_test
