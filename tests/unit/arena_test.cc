#include "lockstep/comm/transport/arena.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "lockstep/base/error.h"

namespace lockstep::arena_test {
namespace {

bool zero(const Buffer& buffer) {
  const std::span<std::byte> bytes = buffer.as<std::byte>();
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

void fill(const Buffer& buffer, int value) { std::memset(buffer.data(), value, buffer.bytes()); }

TEST(HeapBuffer, IsAlignedAndZero) {
  for (const std::size_t bytes : {0, 1, 63, 64, 65, 100'000}) {
    const Buffer buffer = Buffer::heap(bytes);
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 64, 0U);
    EXPECT_TRUE(zero(buffer));
  }
}

TEST(HeapBuffer, MovesAndReleasesOnce) {
  int released = 0;
  {
    std::byte byte{};
    Buffer first(&byte, 1, [&](std::byte* data) { released += data == &byte ? 1 : 100; });
    Buffer second = std::move(first);
    EXPECT_EQ(second.data(), &byte);
    Buffer third;
    third = std::move(second);
    EXPECT_EQ(third.bytes(), 1U);
    EXPECT_EQ(released, 0);
  }
  EXPECT_EQ(released, 1);
}

TEST(Mapping, WhatCouldBeCutIsRefused) {
  const Descriptor file(::memfd_create("cuttable", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(file.get(), 4096), 0);
  EXPECT_THROW(Mapping::of(file, 4096), Error);
  EXPECT_THROW(Mapping::of(make_memfd("short", 100), 4096), Error);
  EXPECT_EQ(Mapping::of(make_memfd("sealed", 4096), 4096)->size(), 4096U);
}

TEST(Arena, GivesZeroAlignedMemory) {
  const auto arena = Arena::create();
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{5000}, std::size_t{3} << 20}) {
    Buffer buffer = arena->allocate(bytes);
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 4096, 0U);
    EXPECT_TRUE(zero(buffer));
    fill(buffer, 7);
    const std::byte* const place = buffer.data();
    buffer = Buffer();  // released when the temporary that took it over goes
    const Buffer again = arena->allocate(bytes);
    EXPECT_EQ(again.data(), place);
    EXPECT_TRUE(zero(again));
  }
}

TEST(Arena, BuffersDoNotOverlap) {
  const auto arena = Arena::create();
  std::mt19937 random(5);
  std::vector<std::pair<Buffer, int>> kept;
  for (int i = 0; i < 500; ++i) {
    if (kept.size() > 20 || (random() % 3 == 0 && !kept.empty())) {
      const std::size_t victim = random() % kept.size();
      kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(victim));
    } else {
      kept.emplace_back(arena->allocate(random() % 50'000), i % 100 + 1);
      ASSERT_TRUE(zero(kept.back().first));
      fill(kept.back().first, kept.back().second);
    }
  }
  for (const auto& [buffer, value] : kept) {
    for (const std::byte b : buffer.as<std::byte>()) ASSERT_EQ(b, static_cast<std::byte>(value));
  }
}

TEST(Arena, KnowsItsOwn) {
  const auto arena = Arena::create();
  const Buffer buffer = arena->allocate(10'000);
  const auto place = arena->offset_of(buffer.data() + 100, 50);
  ASSERT_TRUE(place);
  EXPECT_EQ(arena->data() + *place, buffer.data() + 100);
  std::byte elsewhere{};
  EXPECT_FALSE(arena->offset_of(&elsewhere, 1));
  EXPECT_FALSE(arena->offset_of(arena->data() - 1, 1));
}

TEST(Arena, OthersSeeWhatIsWritten) {
  const auto arena = Arena::create();
  const Buffer buffer = arena->allocate(10'000);
  const auto mapping = Mapping::of(arena->file(), 10'000);
  fill(buffer, 42);
  const auto place = *arena->offset_of(buffer.data(), buffer.bytes());
  EXPECT_EQ(mapping->data()[place + 9'999], std::byte{42});
}

TEST(Arena, TakesSpaceOnlyForWhatIsInUse) {
  const auto arena = Arena::create();
  const auto blocks = [&] {
    struct stat info {};
    EXPECT_EQ(::fstat(arena->file().get(), &info), 0);
    return info.st_blocks * 512;
  };
  const auto before = blocks();
  {
    const Buffer buffer = arena->allocate(8 << 20);
    fill(buffer, 1);
    EXPECT_GE(blocks(), before + (8 << 20));
  }
  EXPECT_EQ(blocks(), before);
}

TEST(Arena, OutlivesItsOwnerForItsBuffers) {
  Buffer buffer;
  {
    const auto arena = Arena::create();
    buffer = arena->allocate(100);
  }
  fill(buffer, 3);
}

TEST(Mapping, RefusesASegmentThatIsTooSmall) {
  const Descriptor file = make_memfd("test", 4096);
  EXPECT_EQ(Mapping::of(file, 4096)->size(), 4096U);
  EXPECT_THROW(Mapping::of(file, 4097), Error);
}

TEST(Mapping, CannotBeCutUnderOurFeet) {
  const Descriptor file = make_memfd("test", 4096);
  EXPECT_NE(::ftruncate(file.get(), 0), 0);
  EXPECT_NE(::ftruncate(file.get(), 8192), 0);
}

}  // namespace
}  // namespace lockstep::arena_test
