#include "lockstep/base/hash/blake3.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/hash/blake3_kernel.h"
#include "lockstep/base/random.h"
#include "tests/unit/blake3_vectors.h"

namespace lockstep::blake3_test {
namespace {

std::vector<std::byte> vector_input(std::size_t length) {
  std::vector<std::byte> bytes(length);
  for (std::size_t i = 0; i < length; ++i) bytes[i] = static_cast<std::byte>(i % 251);
  return bytes;
}

std::vector<std::byte> random_input(std::size_t length) {
  std::vector<std::byte> bytes(length);
  for (std::size_t i = 0; i < length; ++i) bytes[i] = static_cast<std::byte>(random_u64(3, i, 0));
  return bytes;
}

std::span<const std::byte, 32> vector_key() {
  static_assert(sizeof(kBlake3VectorKey) == 33);
  return std::as_bytes(std::span(kBlake3VectorKey)).first<32>();
}

TEST(Blake3, Hex) {
  EXPECT_EQ(to_hex({}), "");
  const std::array bytes{std::byte{0x00}, std::byte{0x9f}, std::byte{0xa0}};
  EXPECT_EQ(to_hex(bytes), "009fa0");
}

TEST(Blake3, Vectors) {
  for (const auto& vector : kBlake3Vectors) {
    const auto input = vector_input(vector.length);
    EXPECT_EQ(to_hex(blake3(input)), vector.hash) << vector.length;
    Blake3 keyed = Blake3::keyed(vector_key());
    keyed.update(input);
    EXPECT_EQ(to_hex(keyed.finish()), vector.keyed_hash) << vector.length;
  }
}

TEST(Blake3, PortableIsAlwaysThere) { EXPECT_STREQ(blake3_kernels().back().name, "portable"); }

TEST(Blake3, FinishLeavesTheStateAlone) {
  const auto input = random_input(10000);
  Blake3 hasher;
  for (std::size_t at = 0; at < input.size(); at += 500) {
    EXPECT_EQ(hasher.finish(), blake3(std::span(input).first(at))) << at;
    hasher.update(std::span(input).subspan(at, 500));
  }
  EXPECT_EQ(hasher.finish(), blake3(input));
}

TEST(Blake3, PiecesInAnyOrderGiveTheSameHash) {
  for (const std::size_t piece : {std::size_t{1024}, std::size_t{1} << 16, std::size_t{1} << 20}) {
    SCOPED_TRACE(piece);
    const auto input = random_input(5 * piece + 1500);
    for (const std::size_t length :
         {std::size_t{0}, std::size_t{1}, piece - 1, piece, piece + 1, 2 * piece, 2 * piece + 1024,
          3 * piece, 4 * piece, 4 * piece + 7, input.size()}) {
      const auto bytes = std::span(input).first(length);
      Blake3Pieces pieces(length, piece);
      for (std::size_t i = pieces.pieces(); i-- > 0;) {
        const std::size_t begin = i * piece;
        const auto own = bytes.subspan(begin, std::min(piece, length - begin));
        if (i % 2 == 0) {
          pieces.update(i, own);
          continue;
        }
        Blake3 hasher = pieces.begin(i);  // bit by bit
        for (std::size_t at = 0; at < own.size(); at += 777) {
          hasher.update(own.subspan(at, std::min<std::size_t>(777, own.size() - at)));
        }
        pieces.end(i, hasher);
      }
      EXPECT_EQ(pieces.finish(), blake3(bytes)) << length;
    }
  }
}

// Every way to hash rows, against the vectors, against one block at a time, and in pieces.
class Blake3KernelTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    for (const auto& kernel : blake3_kernels()) {
      if (std::string_view(kernel.name) == GetParam()) kernel_ = &kernel;
    }
    if (kernel_ == nullptr) GTEST_SKIP() << "this processor has no " << GetParam();
  }

  Blake3Hash hash(std::span<const std::byte> bytes) const {
    Blake3 hasher(*kernel_);
    hasher.update(bytes);
    return hasher.finish();
  }

  const Blake3Kernel* kernel_ = nullptr;
};

TEST_P(Blake3KernelTest, Vectors) {
  for (const auto& vector : kBlake3Vectors) {
    const auto input = vector_input(vector.length);
    EXPECT_EQ(to_hex(hash(input)), vector.hash) << vector.length;
    Blake3 keyed = Blake3::keyed(vector_key(), *kernel_);
    keyed.update(input);
    EXPECT_EQ(to_hex(keyed.finish()), vector.keyed_hash) << vector.length;
  }
}

TEST_P(Blake3KernelTest, RowsAreAsOneBlockAtATime) {
  constexpr std::size_t kMost = 40;
  constexpr std::uint32_t kUntouched = 0xdeadbeef;
  constexpr std::uint64_t kCounter = (std::uint64_t{1} << 32) - 7;  // crosses into the upper word
  const auto input = random_input(kMost * 1024);
  std::array<std::uint32_t, 8> key;
  std::memcpy(key.data(), vector_key().data(), sizeof(key));

  for (const std::size_t blocks : {1, 16}) {
    const bool parent = blocks == 1;
    const std::uint32_t flags = kBlake3Keyed | (parent ? kBlake3Parent : 0);
    for (std::size_t count = 1; count <= kMost; ++count) {
      std::vector<std::uint32_t> expected(8 * count + 8, kUntouched), output = expected;
      for (std::size_t i = 0; i < count; ++i) {
        std::copy(key.begin(), key.end(), &expected[8 * i]);
        for (std::size_t block = 0; block < blocks; ++block) {
          std::uint32_t extra = 0;
          if (!parent && block == 0) extra |= kBlake3ChunkStart;
          if (!parent && block == 15) extra |= kBlake3ChunkEnd;
          blake3_compress(&expected[8 * i], &input[(i * blocks + block) * 64],
                          parent ? 0 : kCounter + i, 64, flags | extra);
        }
      }
      kernel_->hash_row({.input = input.data(),
                         .count = count,
                         .blocks = blocks,
                         .key = key.data(),
                         .counter = kCounter,
                         .flags = flags,
                         .output = output.data()});
      ASSERT_EQ(output, expected) << count << " of " << blocks << " blocks";
    }
  }
}

TEST_P(Blake3KernelTest, SameAsByteByByteAtManyLengths) {
  const auto input = random_input(70 * 1024);
  Blake3 byte_by_byte(blake3_kernels().back());
  for (std::size_t length = 0; length <= input.size(); ++length) {
    const bool near_edge = (length + 2) % 1024 < 5 || length % 509 == 0;
    if (near_edge) {
      ASSERT_EQ(hash(std::span(input).first(length)), byte_by_byte.finish()) << length;
    }
    if (length < input.size()) byte_by_byte.update(std::span(input).subspan(length, 1));
  }
}

TEST_P(Blake3KernelTest, PiecesGiveTheWhole) {
  // More than two of the largest subtrees that are hashed at once.
  const auto input = random_input(600 * 1024 + 77);
  for (std::uint64_t round = 0; round < 60; ++round) {
    const std::size_t length = random_u64(4, round, 0) % (input.size() + 1);
    const auto whole = std::span(input).first(length);
    const std::size_t largest = std::size_t{1} << (random_u64(4, round, 1) % 20);
    Blake3 hasher(*kernel_);
    std::uint64_t index = 2;
    for (std::size_t at = 0; at < length;) {
      std::size_t piece = random_u64(4, round, index++) % (largest + 1);
      if (round % 3 == 0) piece = (piece + 1023) / 1024 * 1024;  // whole chunks
      piece = std::min(piece, length - at);
      hasher.update(whole.subspan(at, piece));
      at += piece;
    }
    ASSERT_EQ(hasher.finish(), blake3(whole)) << "round " << round << ", length " << length;
  }
}

TEST_P(Blake3KernelTest, AnyAlignment) {
  const auto input = random_input(40 * 1024);
  for (std::size_t shift = 0; shift < 64; shift += 7) {
    std::vector<std::byte> shifted(shift);
    shifted.insert(shifted.end(), input.begin(), input.end());
    EXPECT_EQ(hash(std::span(shifted).subspan(shift)), blake3(input)) << shift;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, Blake3KernelTest, testing::Values("portable", "avx2", "avx512"),
                         [](const auto& kernel) { return std::string(kernel.param); });

// A directory that is gone at the end of the test.
class ScratchDirectory {
 public:
  ScratchDirectory() : path_(std::filesystem::temp_directory_path() / "blake3_test.XXXXXX") {
    std::string name = path_;
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp " + name);
    path_ = name;
  }
  ~ScratchDirectory() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

std::string output_of(const std::string& command) {
  std::string output;
  std::FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return output;
  char buffer[4096];
  while (const std::size_t size = std::fread(buffer, 1, sizeof(buffer), pipe)) {
    output.append(buffer, size);
  }
  ::pclose(pipe);
  return output;
}

TEST(Blake3, AgreesWithB3sum) {
  if (output_of("b3sum --version 2>/dev/null").empty()) GTEST_SKIP() << "b3sum is not installed";
  const ScratchDirectory directory;
  const auto input = random_input(2 << 20);
  std::string command = "b3sum --no-names", expected;
  for (std::uint64_t i = 0; i < 60; ++i) {
    // As many short inputs as long ones.
    const std::size_t limit = std::size_t{1} << (1 + random_u64(5, i, 0) % 21);
    const auto part = std::span(input).first(random_u64(5, i, 1) % (limit + 1));
    const auto file = directory.path() / std::to_string(i);
    std::ofstream(file, std::ios::binary)
        .write(reinterpret_cast<const char*>(part.data()), std::ssize(part));
    command.append(" ").append(file);
    expected += to_hex(blake3(part)) + "\n";
  }
  EXPECT_EQ(output_of(command), expected);
}

}  // namespace
}  // namespace lockstep::blake3_test
