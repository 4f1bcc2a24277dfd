#include "lockstep/comm/transport/ring_stream.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <random>
#include <thread>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep::ring_stream_test {
namespace {

std::vector<std::byte> pattern(std::size_t size, std::size_t begin = 0) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>((begin + i) * 31 % 251);
  return bytes;
}

class RingStreamTest : public testing::Test {
 protected:
  RingStreamTest() {
    memory_ = std::make_shared<RingPair>();
    const auto up = make_ring_bells();
    const auto down = make_ring_bells();
    a_ = std::make_unique<RingStream>(memory_, 0, up, down);
    b_ = std::make_unique<RingStream>(memory_, 1, down, up);
  }

  static bool readable(const pollfd& fd) {
    pollfd copy = fd;
    return ::poll(&copy, 1, 0) == 1;
  }

  std::shared_ptr<RingPair> memory_;
  std::unique_ptr<RingStream> a_;
  std::unique_ptr<RingStream> b_;
};

TEST_F(RingStreamTest, HeadComesBeforeBody) {
  EXPECT_EQ(a_->write_some(pattern(3), pattern(5, 3)), 8U);
  std::vector<std::byte> head(4);
  std::vector<std::byte> body(10);
  EXPECT_EQ(b_->read_some(head, body), 8U);
  head.insert(head.end(), body.begin(), body.begin() + 4);
  EXPECT_EQ(head, pattern(8));
  EXPECT_EQ(b_->read_some(head, body), 0U);
}

// Whoever waits reads a bell, whoever leaves writes one: neither may wait for the peer there.
TEST(RingBells, FromAPeerAreEventfdsThatDoNotBlock) {
  const auto eventfd_with = [](int flags) { return Descriptor(::eventfd(0, flags)); };
  EXPECT_NO_THROW(received_ring_bells(eventfd_with(EFD_NONBLOCK), eventfd_with(EFD_NONBLOCK)));
  EXPECT_THROW(received_ring_bells(eventfd_with(0), eventfd_with(EFD_NONBLOCK)), Error);
  EXPECT_THROW(received_ring_bells(eventfd_with(EFD_NONBLOCK), eventfd_with(0)), Error);
  for (const int flags : {0, O_NONBLOCK}) {
    std::array<int, 2> ends{};
    ASSERT_EQ(::pipe2(ends.data(), flags), 0);
    Descriptor end(ends[0]);
    const Descriptor other(ends[1]);
    EXPECT_THROW(received_ring_bells(std::move(end), eventfd_with(EFD_NONBLOCK)), Error);
  }
}

// A peer can write all of the memory.
TEST_F(RingStreamTest, RefusesCountersThatCannotBe) {
  std::vector<std::byte> some(100);
  for (const std::uint64_t counter : {std::uint64_t{1}, ByteRing::kCapacity + 100}) {
    memory_->rings[0].read = counter;  // more than was written
    EXPECT_THROW(a_->write_some(some, some), Error) << counter;
    memory_->rings[0].read = 0;
  }
  for (const std::uint64_t counter : {ByteRing::kCapacity + 1, UINT64_MAX}) {
    memory_->rings[1].written = counter;
    EXPECT_THROW(a_->read_some(some, some), Error) << counter;
  }
}

TEST_F(RingStreamTest, TakesNoMoreThanFits) {
  const auto much = pattern(2 * ByteRing::kCapacity);
  EXPECT_EQ(a_->write_some({}, much), ByteRing::kCapacity);
  EXPECT_EQ(a_->write_some({}, much), 0U);
  std::vector<std::byte> got(10);
  EXPECT_EQ(b_->read_some({}, got), 10U);
  EXPECT_EQ(a_->write_some({}, much), 10U);
  // The other direction is another ring.
  EXPECT_EQ(b_->write_some({}, much), ByteRing::kCapacity);
}

TEST_F(RingStreamTest, BytesSurviveTheWrap) {
  std::mt19937 random(3);
  std::size_t written = 0;
  std::size_t read = 0;
  while (read < 5 * ByteRing::kCapacity) {
    written += a_->write_some(pattern(random() % 100, written), {});
    written += a_->write_some({}, pattern(random() % 300'000, written));
    std::vector<std::byte> got(random() % 400'000);
    got.resize(b_->read_some({}, got));
    ASSERT_EQ(got, pattern(got.size(), read));
    read += got.size();
  }
}

TEST_F(RingStreamTest, AReaderIsWokenByData) {
  std::vector<pollfd> fds;
  ASSERT_TRUE(b_->prepare_wait(Direction::kRecv, fds));
  ASSERT_EQ(fds.size(), 1U);
  EXPECT_FALSE(readable(fds[0]));
  a_->write_some({}, pattern(1));
  EXPECT_TRUE(readable(fds[0]));
  b_->finish_wait(Direction::kRecv);
  EXPECT_FALSE(readable(fds[0]));
  // Nobody sleeps any more, so nobody is woken; and there is no reason to sleep.
  a_->write_some({}, pattern(1));
  EXPECT_FALSE(readable(fds[0]));
  EXPECT_FALSE(b_->prepare_wait(Direction::kRecv, fds));
  b_->finish_wait(Direction::kRecv);
}

TEST_F(RingStreamTest, AWriterIsWokenByRoom) {
  std::vector<pollfd> fds;
  EXPECT_FALSE(a_->prepare_wait(Direction::kSend, fds));
  a_->finish_wait(Direction::kSend);
  a_->write_some({}, pattern(ByteRing::kCapacity));
  fds.clear();
  ASSERT_TRUE(a_->prepare_wait(Direction::kSend, fds));
  EXPECT_FALSE(readable(fds[0]));
  std::vector<std::byte> got(1);
  b_->read_some({}, got);
  EXPECT_TRUE(readable(fds[0]));
  a_->finish_wait(Direction::kSend);
}

TEST_F(RingStreamTest, WhatWasSentArrivesBeforeTheEnd) {
  std::vector<pollfd> fds;
  ASSERT_TRUE(b_->prepare_wait(Direction::kRecv, fds));
  a_->write_some({}, pattern(10));
  b_->finish_wait(Direction::kRecv);
  a_.reset();
  EXPECT_TRUE(readable(fds[0]));
  std::vector<std::byte> got(20);
  EXPECT_EQ(b_->read_some({}, got), 10U);
  EXPECT_THROW(b_->read_some({}, got), Error);
  EXPECT_THROW(b_->write_some({}, got), Error);
  EXPECT_FALSE(b_->prepare_wait(Direction::kRecv, fds));
}

// Each thread sleeps whenever it has nothing to do: a lost wake-up would hang.
TEST_F(RingStreamTest, ThreadsDoNotMissEachOther) {
  constexpr std::size_t kTotal = 8 << 20;
  const auto wait = [](RingStream& stream, Direction direction) {
    std::vector<pollfd> fds;
    if (stream.prepare_wait(direction, fds)) {
      ASSERT_EQ(::poll(fds.data(), fds.size(), 30'000), 1);
    }
    stream.finish_wait(direction);
  };
  std::thread writer([&] {
    std::mt19937 random(1);
    for (std::size_t written = 0; written < kTotal && !HasFatalFailure();) {
      const std::size_t size = std::min<std::size_t>(random() % 70'000 + 1, kTotal - written);
      const std::size_t moved = a_->write_some({}, pattern(size, written));
      written += moved;
      if (moved == 0) wait(*a_, Direction::kSend);
    }
  });
  std::mt19937 random(2);
  for (std::size_t read = 0; read < kTotal && !HasFatalFailure();) {
    std::vector<std::byte> got(random() % 70'000 + 1);
    got.resize(b_->read_some({}, got));
    EXPECT_EQ(got, pattern(got.size(), read));
    read += got.size();
    if (got.empty()) wait(*b_, Direction::kRecv);
  }
  writer.join();
}

}  // namespace
}  // namespace lockstep::ring_stream_test
