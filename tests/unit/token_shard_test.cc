#include "lockstep/data/token_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "lockstep/base/error.h"
#include "lockstep/base/hash/crc32c.h"
#include "lockstep/wire/bytes.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::token_shard_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class TokenShardTest : public ::testing::Test {
 protected:
  std::string path(const char* name) const { return folder_.path() + "/" + name; }
  std::string write(const char* name, std::span<const std::byte> bytes) const {
    std::ofstream file(path(name), std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    return path(name);
  }
  TemporaryFolder folder_;
};

std::vector<std::int32_t> all_of(const TokenShard& shard, std::uint32_t vocab = kMostVocab) {
  std::vector<std::int32_t> tokens(shard.size());
  shard.copy(0, vocab, tokens);
  return tokens;
}

template <typename Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    return error.what();
  }
  return "no error";
}

ShardHeader header_of(std::uint32_t vocab) {
  ShardHeader header;
  header.vocab = vocab;
  header.tokenizer = TokenizerKind::kBytes;
  header.entropy_per_byte = 0.25;
  return header;
}

TEST_F(TokenShardTest, WritesAndReadsBothWidths) {
  for (const std::uint32_t vocab : {300u, 65536u, 65537u, 128000u}) {
    const std::string name = path("a.bin");
    ShardWriter writer(name, header_of(vocab));
    writer.write(std::vector<std::int32_t>{1, 2, static_cast<std::int32_t>(vocab) - 1});
    writer.write(std::vector<std::int32_t>{4});
    const ShardHeader written = writer.commit(77);
    EXPECT_EQ(written.token_bytes, vocab <= 65536 ? 2u : 4u);
    const TokenShard shard = TokenShard::open(name);
    EXPECT_EQ(shard.header(), written);
    EXPECT_EQ(shard.header().text_bytes, 77u);
    EXPECT_THAT(all_of(shard, vocab), ElementsAre(1, 2, vocab - 1, 4));
    EXPECT_EQ(shard.largest(), vocab - 1);
    EXPECT_EQ(std::filesystem::file_size(name), kShardHeaderBytes + 4 * written.token_bytes);
  }
}

TEST_F(TokenShardTest, WithoutCommitNothingIsThere) {
  { ShardWriter writer(path("a.bin"), header_of(256)); }
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

TEST_F(TokenShardTest, ReadsNanoGpt) {
  const std::vector<std::uint16_t> tokens = {7, 50256, 0};
  const TokenShard shard = TokenShard::open(write("train.bin", std::as_bytes(std::span(tokens))));
  EXPECT_EQ(shard.format(), ShardFormat::kNanoGpt);
  EXPECT_EQ(shard.header().vocab, 0u);
  EXPECT_THAT(all_of(shard), ElementsAre(7, 50256, 0));
}

TEST_F(TokenShardTest, ReadsLlmC) {
  for (const bool llama : {false, true}) {
    std::vector<std::int32_t> head(256);
    head[0] = llama ? 20240801 : 20240520;
    head[1] = llama ? 7 : 1;
    head[2] = 3;
    ByteWriter bytes;
    bytes.bytes(std::as_bytes(std::span(head)));
    for (const std::uint16_t token : std::vector<std::uint16_t>{5, 6, 7}) {
      llama ? bytes.u32(token) : bytes.u16(token);
    }
    const TokenShard shard = TokenShard::open(write("x.bin", bytes.written()));
    EXPECT_EQ(shard.format(), ShardFormat::kLlmC);
    EXPECT_EQ(shard.header().vocab, llama ? 128256u : 50257u);
    EXPECT_THAT(all_of(shard), ElementsAre(5, 6, 7));

    bytes.u8(0);
    EXPECT_THAT(message_of([&] { TokenShard::open(write("y.bin", bytes.written())); }),
                HasSubstr("1 bytes beyond the 3 tokens"));
    const auto cut = bytes.written().first(1024 + 3);
    EXPECT_THAT(message_of([&] { TokenShard::open(write("z.bin", cut)); }),
                HasSubstr(std::string("z.bin: byte 1027: the file ends after ") +
                          (llama ? "0" : "1") + " of the 3"));
    head[1] = 99;
    EXPECT_THAT(
        message_of([&] { TokenShard::open(write("v.bin", std::as_bytes(std::span(head)))); }),
        HasSubstr("v.bin: byte 4: llm.c data version 99"));
  }
}

TEST_F(TokenShardTest, TokenBeyondTheVocabulary) {
  const std::vector<std::uint16_t> tokens = {1, 2, 300, 4};
  const TokenShard shard = TokenShard::open(write("t.bin", std::as_bytes(std::span(tokens))));
  std::vector<std::int32_t> out(3);
  EXPECT_THAT(message_of([&] { shard.copy(1, 256, out); }),
              HasSubstr("t.bin: byte 4: token 2 has id 300, but the vocabulary has 256"));
  EXPECT_THAT(message_of([&] { shard.largest(300); }), HasSubstr("token 2"));
  EXPECT_EQ(shard.largest(301), 300u);
}

// One thing wrong at a time, with the checksum made right again.
TEST_F(TokenShardTest, BrokenHeadersAreToldWithTheirPosition) {
  const auto broken = [&](std::size_t position, std::initializer_list<std::uint8_t> bytes) {
    ShardHeader header = header_of(256);
    header.tokens = 2;
    std::vector<std::byte> file(kShardHeaderBytes + 4);
    std::ranges::copy(encode(header), file.begin());
    std::memcpy(file.data() + position, std::data(bytes), bytes.size());
    if (position != kShardHeaderBytes - 4) {
      store_little_endian(file.data() + kShardHeaderBytes - 4,
                          crc32c(std::span(file).first(kShardHeaderBytes - 4)));
    }
    return message_of([&] { TokenShard::open(write("s.bin", file)); });
  };
  EXPECT_EQ(broken(24, {2}), "no error");
  EXPECT_THAT(broken(8, {2}), HasSubstr("s.bin: byte 8: shard version 2, this program reads 1"));
  EXPECT_THAT(broken(12, {3}), HasSubstr("byte 12: 3 bytes per token"));
  EXPECT_THAT(broken(16, {0, 0}), HasSubstr("byte 16: a vocabulary of 0"));
  EXPECT_THAT(broken(16, {1, 0, 0, 0x80}), HasSubstr("byte 16: a vocabulary of 2147483649"));
  EXPECT_THAT(broken(20, {9}), HasSubstr("byte 20: tokenizer 9"));
  EXPECT_THAT(broken(24, {3}), HasSubstr("byte 132: the file ends after 2 of the 3 tokens"));
  EXPECT_THAT(broken(24, {1}), HasSubstr("byte 130: 2 bytes beyond the 1 tokens"));
  EXPECT_THAT(broken(24, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}),
              HasSubstr("the file ends after 2"));
  EXPECT_THAT(broken(46, {0xf0, 0x7f}), HasSubstr("byte 40: the entropy"));
  EXPECT_THAT(broken(100, {1}), HasSubstr("byte 80: reserved bytes"));
  EXPECT_THAT(broken(kShardHeaderBytes - 4, {1, 2, 3, 4}),
              HasSubstr("byte 124: the header's checksum"));
}

TEST_F(TokenShardTest, FilesThatAreNoShards) {
  EXPECT_THAT(message_of([&] { TokenShard::open(path("none.bin")); }),
              HasSubstr("none.bin: No such file"));
  EXPECT_THAT(message_of([&] { TokenShard::open(write("empty.bin", {})); }),
              HasSubstr("empty.bin: byte 0: the file is empty"));
  const std::vector<std::byte> odd(7);
  EXPECT_THAT(message_of([&] { TokenShard::open(write("odd.bin", odd)); }),
              HasSubstr("odd.bin: byte 7: an odd number"));
  const auto head = encode(header_of(256));
  EXPECT_THAT(message_of([&] { TokenShard::open(write("short.bin", std::span(head).first(20))); }),
              HasSubstr("short.bin: byte 20: the file ends inside its header"));
  EXPECT_THAT(message_of([&] { TokenShard::open(folder_.path()); }), HasSubstr("Is a directory"));
}

}  // namespace
}  // namespace lockstep::token_shard_test
