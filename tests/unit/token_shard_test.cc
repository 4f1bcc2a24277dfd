#include "lockstep/data/token_shard.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "lockstep/base/error.h"
#include "lockstep/base/hash/crc32c.h"
#include "lockstep/wire/bytes.h"
#include "tests/support/error_text.h"
#include "tests/support/faulty_storage.h"
#include "tests/support/temporary_folder.h"

namespace lockstep::token_shard_test {
namespace {

using test::io_error_of;
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
    EXPECT_THAT(io_error_of([&] { TokenShard::open(write("y.bin", bytes.written())); }),
                HasSubstr("1 bytes beyond the 3 tokens"));
    const auto cut = bytes.written().first(1024 + 3);
    EXPECT_THAT(io_error_of([&] { TokenShard::open(write("z.bin", cut)); }),
                HasSubstr(std::string("z.bin: byte 1027: the file ends after ") +
                          (llama ? "0" : "1") + " of the 3"));
    head[1] = 99;
    EXPECT_THAT(
        io_error_of([&] { TokenShard::open(write("v.bin", std::as_bytes(std::span(head)))); }),
        HasSubstr("v.bin: byte 4: llm.c data version 99"));
  }
}

TEST_F(TokenShardTest, TokenBeyondTheVocabulary) {
  const std::vector<std::uint16_t> tokens = {1, 2, 300, 4};
  const TokenShard shard = TokenShard::open(write("t.bin", std::as_bytes(std::span(tokens))));
  std::vector<std::int32_t> out(3);
  EXPECT_THAT(io_error_of([&] { shard.copy(1, 256, out); }),
              HasSubstr("t.bin: byte 4: token 2 has id 300, but the vocabulary has 256"));
  EXPECT_THAT(io_error_of([&] { shard.largest(300); }), HasSubstr("token 2"));
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
    return io_error_of([&] { TokenShard::open(write("s.bin", file)); });
  };
  EXPECT_EQ(broken(24, {2}), "no error");
  EXPECT_THAT(broken(8, {3}),
              HasSubstr("s.bin: byte 8: shard version 3, this program reads 1 and 2"));
  EXPECT_EQ(broken(8, {2}), "no error");  // with a hash of zeros, which nobody has compared yet
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
  EXPECT_THAT(io_error_of([&] { TokenShard::open(path("none.bin")); }),
              HasSubstr("none.bin: No such file"));
  EXPECT_THAT(io_error_of([&] { TokenShard::open(write("empty.bin", {})); }),
              HasSubstr("empty.bin: byte 0: the file is empty"));
  const std::vector<std::byte> odd(7);
  EXPECT_THAT(io_error_of([&] { TokenShard::open(write("odd.bin", odd)); }),
              HasSubstr("odd.bin: byte 7: an odd number"));
  const auto head = encode(header_of(256));
  EXPECT_THAT(io_error_of([&] { TokenShard::open(write("short.bin", std::span(head).first(20))); }),
              HasSubstr("short.bin: byte 20: the file ends inside its header"));
  EXPECT_THAT(io_error_of([&] { TokenShard::open(folder_.path()); }), HasSubstr("Is a directory"));
}

// It was mapped once, and the process ended with SIGBUS.
TEST_F(TokenShardTest, AFileThatIsCutShortIsAnError) {
  const std::vector<std::uint16_t> tokens(10'000, 7);
  const std::string name = write("t.bin", std::as_bytes(std::span(tokens)));
  const TokenShard shard = TokenShard::open(name);
  std::filesystem::resize_file(name, 4096);
  std::vector<std::int32_t> out(100);
  EXPECT_EQ(io_error_of([&] { shard.copy(1948, 8, out); }), "no error");
  EXPECT_THAT(io_error_of([&] { shard.copy(1950, 8, out); }),
              HasSubstr("t.bin: the file ends at byte 4096, but bytes up to 4100 were there"));
  EXPECT_THAT(io_error_of([&] { shard.copy(9000, 8, out); }),
              HasSubstr("t.bin: the file ends at byte 4096, but bytes up to 18200 were there"));
  EXPECT_THAT(io_error_of([&] { shard.payload().get(); }), HasSubstr("t.bin: the file ends at"));
}

TEST_F(TokenShardTest, ABadSectorIsNamed) {
  test::FaultyStorage storage;
  storage.set_contents("/t.bin", std::string(20'000, 'x'));
  storage.fault = [&](test::FaultyStorage::Call call, const std::string& name) {
    return call == test::FaultyStorage::Call::kRead && name == "/t.bin" &&
                   storage.bytes_read() > 5000
               ? EIO
               : 0;
  };
  const TokenShard shard = TokenShard::open("/t.bin", storage);
  std::vector<std::int32_t> out(3000);
  EXPECT_EQ(io_error_of([&] { shard.copy(0, kMostVocab, out); }), "no error");
  EXPECT_THAT(io_error_of([&] { shard.copy(3000, kMostVocab, out); }),
              HasSubstr("reading /t.bin at byte 6000: Input/output error"));
}

TEST_F(TokenShardTest, SamplesAreReadInOnePiece) {
  for (const std::size_t length : {1u, 2u, 1000u, 30'000u}) {
    ShardWriter writer(path("s.bin"), header_of(60'000));
    std::vector<std::int32_t> tokens(length + 11);
    for (std::size_t i = 0; i < tokens.size(); ++i)
      tokens[i] = static_cast<std::int32_t>(3 * i % 60'000);
    writer.write(tokens);
    writer.commit(0);
    std::vector<std::int32_t> first(length), second(length);
    for (const TokenShard& shard :
         {TokenShard::open(path("s.bin")), TokenShard::of("memory", tokens, header_of(60'000))}) {
      shard.copy_sample(10, 60'000, first, second);
      EXPECT_TRUE(std::ranges::equal(first, std::span(tokens).subspan(10, length)));
      EXPECT_TRUE(std::ranges::equal(second, std::span(tokens).subspan(11, length)));
    }
    EXPECT_THAT(io_error_of([&] {
                  TokenShard::open(path("s.bin"))
                      .copy_sample(10, static_cast<std::uint32_t>(tokens.back()), first, second);
                }),
                HasSubstr("token"));
  }
}

// The hash of the tokens: in the header of ours, and the same for tokens in memory.
TEST_F(TokenShardTest, OneHashWhereverTheTokensAre) {
  for (const std::uint32_t vocab : {300u, 70'000u}) {
    const std::vector<std::int32_t> tokens = {1, 2, 299, 4};
    ShardWriter writer(path("a.bin"), header_of(vocab));
    writer.write(tokens);
    const ShardHeader header = writer.commit(0);
    const TokenShard shard = TokenShard::open(path("a.bin"));
    EXPECT_EQ(shard.header().payload, header.payload);
    EXPECT_EQ(shard.payload().get(), header.payload);
    EXPECT_EQ(TokenShard::of("memory", tokens, header_of(vocab)).payload().get(), header.payload);
  }
  EXPECT_EQ(
      TokenShard::of("memory", std::vector<std::uint8_t>{1, 2}, header_of(256)).payload().get(),
      TokenShard::of("memory", std::vector<std::int32_t>{1, 2}, header_of(256)).payload().get());
}

TEST_F(TokenShardTest, AChangedTokenIsFound) {
  ShardWriter writer(path("a.bin"), header_of(300));
  writer.write(std::vector<std::int32_t>(5000, 7));
  writer.commit(0);
  EXPECT_EQ(io_error_of([&] { TokenShard::open(path("a.bin")).payload().get(); }), "no error");
  std::fstream file(path("a.bin"), std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(-2, std::ios::end);
  file.put('\x08');
  file.close();
  EXPECT_THAT(io_error_of([&] { TokenShard::open(path("a.bin")).payload().get(); }),
              HasSubstr("a.bin: is damaged: the hash of its tokens is not the one in its header"));
}

// Data sets have hundreds of shards, and a process 1024 descriptors.
TEST_F(TokenShardTest, AShardKeepsOneDescriptor) {
  constexpr std::size_t kShards = 20;
  for (std::size_t i = 0; i < kShards; ++i) {
    write(fmt::format("{}.bin", i).c_str(), std::as_bytes(std::span("abc")));
  }
  const auto descriptors = [] {
    const std::filesystem::directory_iterator all("/proc/self/fd");
    return std::distance(begin(all), end(all));
  };
  const auto before = descriptors();
  std::vector<TokenShard> shards;
  for (std::size_t i = 0; i < kShards; ++i) {
    shards.push_back(TokenShard::open(path(fmt::format("{}.bin", i).c_str())));
    shards.back().payload().get();
  }
  EXPECT_EQ(descriptors() - before, kShards);
}

TEST_F(TokenShardTest, AFileThatShrinksUnderItsReaderIsRefused) {
  const ShardHeaderBytes ours = encode(header_of(300));
  for (const std::uint64_t bytes : {std::uint64_t{0}, ours.size() - 1}) {
    const auto parsed = parse_shard(ours, bytes, true);
    ASSERT_TRUE(std::holds_alternative<ShardProblem>(parsed)) << bytes;
    EXPECT_EQ(std::get<ShardProblem>(parsed).what, "the file ends inside its header");
  }
}

// Kept beside the file, as long as the file stays as it is.
TEST_F(TokenShardTest, TheHashOfAFileIsFoundOnce) {
  test::FaultyStorage storage;
  const std::string bytes(100'000, 'x');
  storage.set_contents("/t.bin", bytes);
  const auto hash = [&] { return TokenShard::open("/t.bin", storage).payload().get(); };
  const auto read_by = [&](auto&& body) {
    const std::uint64_t before = storage.bytes_read();
    body();
    return storage.bytes_read() - before;
  };
  storage.pass(2'000'000'000);
  EXPECT_GT(read_by([&] { EXPECT_EQ(hash(), blake3(std::as_bytes(std::span(bytes)))); }), 100'000u);
  EXPECT_TRUE(storage.contents("/t.bin.blake3"));
  EXPECT_LT(read_by([&] { EXPECT_EQ(hash(), blake3(std::as_bytes(std::span(bytes)))); }), 5'000u);
  // The same size, one other token.
  std::string other = bytes;
  other[99'999] = 'y';
  storage.pass(2'000'000'000);
  storage.set_contents("/copy.bin", other);
  storage.pass(2'000'000'000);
  storage.set_contents("/copy.bin.blake3", *storage.contents("/t.bin.blake3"));  // copied along
  EXPECT_EQ(TokenShard::open("/copy.bin", storage).payload().get(),
            blake3(std::as_bytes(std::span(other))));
  storage.set_contents("/t.bin", other);
  storage.pass(2'000'000'000);
  EXPECT_GT(read_by([&] { EXPECT_EQ(hash(), blake3(std::as_bytes(std::span(other)))); }), 100'000u);
  EXPECT_LT(read_by([&] { EXPECT_EQ(hash(), blake3(std::as_bytes(std::span(other)))); }), 5'000u);
  // A change so shortly before the hash was written could have been followed by another.
  storage.set_contents("/t.bin", bytes);
  EXPECT_GT(read_by(hash), 100'000u);
  EXPECT_GT(read_by(hash), 100'000u);
  // What somebody else has written there is not believed.
  for (const char* text : {"", "{}", "{\"blake3\":\"00\"}"}) {
    storage.pass(2'000'000'000);
    storage.set_contents("/t.bin.blake3", text);
    EXPECT_GT(read_by(hash), 100'000u) << text;
  }
  // A folder that cannot be written to.
  storage.set_contents("/t.bin", other);
  storage.fault = [](test::FaultyStorage::Call call, const std::string&) {
    return call == test::FaultyStorage::Call::kCreate ? EROFS : 0;
  };
  EXPECT_GT(read_by(hash), 100'000u);
}

TEST_F(TokenShardTest, AFileThatChangesWhileItIsHashedIsRefused) {
  test::FaultyStorage storage;
  storage.set_contents("/t.bin", std::string(20'000, 'x'));
  const TokenShard shard = TokenShard::open("/t.bin", storage);
  storage.set_contents("/t.bin", std::string(20'000, 'y'));
  EXPECT_THAT(io_error_of([&] { shard.payload().get(); }), HasSubstr("changes while it is read"));
}

}  // namespace
}  // namespace lockstep::token_shard_test
