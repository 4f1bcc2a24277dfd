#include "lockstep/comm/transport/compression_gauge.h"

#include <gtest/gtest.h>

namespace lockstep::compression_gauge_test {
namespace {

using namespace std::chrono_literals;

// A connection over a link of so many bytes a second, which is looked at every 40 ms.
class Sender {
 public:
  explicit Sender(double link, int connections = 1) : gauge_(connections), link_(link) {}

  void send(int looks, double compressor = 0, std::chrono::nanoseconds receiver = 0ms) {
    for (int i = 0; i < looks; ++i) {
      const double bytes = link_ * 0.04;
      seen_.bytes += static_cast<std::uint64_t>(bytes);
      seen_.busy += 40ms;
      seen_.receiver += receiver;
      seen_.waiting = 1 << 20;
      if (compressor > 0 && gauge_.pays()) {
        gauge_.add_cost(
            static_cast<std::size_t>(bytes),
            std::chrono::nanoseconds(static_cast<std::int64_t>(1e9 * bytes / compressor)));
      }
      gauge_.look(seen_);
    }
  }
  bool pays() const { return gauge_.pays(); }

 private:
  CompressionGauge gauge_;
  const double link_;
  CompressionGauge::Link seen_;
};

TEST(CompressionGauge, PaysOnASlowLinkAndNotOnAFastOne) {
  Sender slow(125e6), fast(1.25e9);
  EXPECT_FALSE(slow.pays()) << "nothing is known yet";
  slow.send(1);
  fast.send(1);
  EXPECT_TRUE(slow.pays());
  EXPECT_FALSE(fast.pays());
}

TEST(CompressionGauge, ConnectionsOfOneThreadCountTogether) {
  Sender alone(100e6), one_of_four(100e6, 4);
  alone.send(1);
  one_of_four.send(1);
  EXPECT_TRUE(alone.pays());
  EXPECT_FALSE(one_of_four.pays());
}

TEST(CompressionGauge, AProcessorThatHasOtherWorkStopsIt) {
  Sender sender(125e6);
  sender.send(20, 1.5e9);
  EXPECT_TRUE(sender.pays());
  sender.send(20, 0.5e9);
  EXPECT_FALSE(sender.pays());
  sender.send(40);
  EXPECT_TRUE(sender.pays()) << "and it is tried again";
}

TEST(CompressionGauge, BetweenTheTwoLimitsItStaysAsItWas) {
  Sender begun(125e6), not_yet(215e6);
  begun.send(1);
  begun.send(200, 7 * 125e6);
  EXPECT_TRUE(begun.pays());
  not_yet.send(20);
  EXPECT_FALSE(not_yet.pays());
}

TEST(CompressionGauge, AReceiverWithoutRoomSaysNothingOfTheLink) {
  Sender sender(10e6);
  sender.send(10, 0, 30ms);
  EXPECT_FALSE(sender.pays());
}

TEST(CompressionGauge, LittleIsNoMeasure) {
  CompressionGauge gauge(1);
  gauge.look({1 << 20, 10ms, 0ms, 1 << 20});
  EXPECT_FALSE(gauge.pays()) << "ticks of the system's clock";
  gauge.look({2 << 20, 60s, 0ms, 1 << 20});
  EXPECT_TRUE(gauge.pays());
  CompressionGauge messages(1);
  messages.look({100'000, 10s, 0ms, 1 << 20});
  EXPECT_FALSE(messages.pays());
}

// Small messages whose answers are waited for are slow on any link.
TEST(CompressionGauge, WhatLeavesAtOnceIsNoMeasure) {
  CompressionGauge gauge(1);
  for (int i = 1; i < 100; ++i) gauge.look({std::uint64_t{1} << 20 << i / 20, i * 50ms, 0ms, 100});
  EXPECT_FALSE(gauge.pays());
  gauge.look({std::uint64_t{8} << 20, 5000ms, 0ms, 1 << 20});
  EXPECT_FALSE(gauge.pays()) << "nor is the time before bytes wait";
}

}  // namespace
}  // namespace lockstep::compression_gauge_test
