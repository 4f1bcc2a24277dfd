#include "lockstep/wire/bytes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "lockstep/base/error.h"

namespace lockstep::bytes_test {
namespace {

std::vector<std::byte> bytes_of(std::initializer_list<int> values) {
  std::vector<std::byte> bytes;
  for (const int value : values) bytes.push_back(static_cast<std::byte>(value));
  return bytes;
}

TEST(Bytes, IntegersLieLittleEndian) {
  ByteWriter writer;
  writer.u8(0x01);
  writer.u16(0x0203);
  writer.u32(0x04050607);
  writer.u64(0x08090a0b0c0d0e0f);
  writer.u32_big_endian(0x10111213);
  EXPECT_EQ(std::move(writer).take(),
            bytes_of({0x01, 0x03, 0x02, 0x07, 0x06, 0x05, 0x04, 0x0f, 0x0e, 0x0d, 0x0c, 0x0b, 0x0a,
                      0x09, 0x08, 0x10, 0x11, 0x12, 0x13}));
}

TEST(Bytes, WhatIsWrittenIsRead) {
  ByteWriter writer;
  writer.u8(255);
  writer.u16(65535);
  writer.u32(4000000000u);
  writer.u64(std::numeric_limits<std::uint64_t>::max());
  writer.i32(-5);
  writer.i64(std::numeric_limits<std::int64_t>::min());
  writer.f32(-0.0f);
  writer.f64(std::numeric_limits<double>::denorm_min());
  writer.u32_big_endian(77);
  writer.string("rank 3", 100);
  writer.string("", 100);
  writer.count(2);
  writer.bytes(bytes_of({9, 8}));

  ByteReader reader(writer.written());
  EXPECT_EQ(reader.u8(), 255);
  EXPECT_EQ(reader.u16(), 65535);
  EXPECT_EQ(reader.u32(), 4000000000u);
  EXPECT_EQ(reader.u64(), std::numeric_limits<std::uint64_t>::max());
  EXPECT_EQ(reader.i32(), -5);
  EXPECT_EQ(reader.i64(), std::numeric_limits<std::int64_t>::min());
  EXPECT_TRUE(std::signbit(reader.f32()));
  EXPECT_EQ(reader.f64(), std::numeric_limits<double>::denorm_min());
  EXPECT_EQ(reader.u32_big_endian(), 77u);
  EXPECT_EQ(reader.string(100), "rank 3");
  EXPECT_EQ(reader.string(100), "");
  EXPECT_EQ(reader.count(1), 2u);
  EXPECT_FALSE(reader.finished());
  const auto rest = reader.bytes(2);
  EXPECT_EQ(std::vector(rest.begin(), rest.end()), bytes_of({9, 8}));
  EXPECT_TRUE(reader.finished());
}

TEST(Bytes, FailureIsSticky) {
  const auto bytes = bytes_of({1, 2, 3});
  ByteReader reader(bytes);
  EXPECT_EQ(reader.u32(), 0u);
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.u8(), 0) << "bytes that were there are no longer read";
  EXPECT_EQ(reader.remaining(), 0u);
  EXPECT_FALSE(reader.finished());
  EXPECT_FALSE(reader.ok());
}

TEST(Bytes, EveryTruncationFails) {
  ByteWriter writer;
  writer.u16(1);
  writer.string("abc", 8);
  writer.f64(0.5);
  const auto whole = writer.written();
  for (std::size_t size = 0; size <= whole.size(); ++size) {
    ByteReader reader(whole.first(size));
    reader.u16();
    reader.string(8);
    reader.f64();
    EXPECT_EQ(reader.finished(), size == whole.size()) << size;
  }
}

TEST(Bytes, LeftOverBytesAreNotFinished) {
  const auto bytes = bytes_of({1, 2});
  ByteReader reader(bytes);
  EXPECT_EQ(reader.u8(), 1);
  EXPECT_TRUE(reader.ok());
  EXPECT_FALSE(reader.finished());
  EXPECT_EQ(reader.remaining(), 1u);
}

TEST(Bytes, EmptyInput) {
  EXPECT_TRUE(ByteReader({}).finished());
  ByteReader reader({});
  EXPECT_TRUE(reader.bytes(0).empty());
  EXPECT_TRUE(reader.finished());
  EXPECT_EQ(reader.u8(), 0);
  EXPECT_FALSE(reader.ok());
}

TEST(Bytes, CountIsCheckedAgainstTheBytesThere) {
  const auto count_of = [](std::uint32_t claimed, std::size_t there, std::size_t element_bytes,
                           std::uint32_t most) {
    ByteWriter writer;
    writer.u32(claimed);
    writer.bytes(std::vector<std::byte>(there));
    ByteReader reader(writer.written());
    const std::uint32_t count = reader.count(element_bytes, most);
    return reader.ok() ? static_cast<int>(count) : -1;
  };
  EXPECT_EQ(count_of(3, 24, 8, 3), 3);
  EXPECT_EQ(count_of(3, 23, 8, 3), -1);
  EXPECT_EQ(count_of(3, 24, 8, 2), -1);
  EXPECT_EQ(count_of(0, 0, 8, 3), 0);
  EXPECT_EQ(count_of(0xffffffff, 100, 8, UINT32_MAX), -1);
  // Times the size this is 0 in 64 bits.
  EXPECT_EQ(count_of(0x80000000, 100, std::size_t{1} << 33, UINT32_MAX), -1);
}

TEST(Bytes, StringKeepsItsMaximum) {
  ByteWriter writer;
  EXPECT_THROW(writer.string("four", 3), Error);
  EXPECT_TRUE(writer.written().empty()) << "a refused string leaves no trace";
  writer.string("four", 4);
  EXPECT_EQ(ByteReader(writer.written()).string(4), "four");
  ByteReader reader(writer.written());
  EXPECT_EQ(reader.string(3), "");
  EXPECT_FALSE(reader.ok());
}

TEST(Bytes, WriterRefusesTooManyElements) {
  ByteWriter writer;
  try {
    writer.count(std::size_t{1} << 32);
    FAIL() << "2^32 does not fit";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kMessageTooLarge);
  }
}

TEST(Bytes, CallerMayFailTheReader) {
  const auto bytes = bytes_of({1, 2});
  ByteReader reader(bytes);
  reader.fail();
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.u8(), 0);
}

}  // namespace
}  // namespace lockstep::bytes_test
