#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace lockstep {

// Whether compression makes a connection faster: where the link is much slower than a processor
// compresses. Both are measured while bytes travel, the processor by the clock on the wall, so that
// one with other work counts as slow. Pure; used by the thread that sends.
class CompressionGauge {
 public:
  using Duration = std::chrono::nanoseconds;

  // `connections`: how many of this kind the thread serves at the same time.
  explicit CompressionGauge(int connections) : connections_(connections) {}

  // What the system has counted since the connection was made.
  struct Link {
    std::uint64_t bytes = 0;    // acknowledged
    Duration busy{};            // while there was something to send
    Duration receiver{};        // of that, while the receiver had no room
    std::uint64_t waiting = 0;  // bytes that have not left this host yet
  };
  // To be told now and then while bytes are sent.
  void look(const Link& link);
  // So many bytes were given to the compressor, and it took so long.
  void add_cost(std::size_t bytes, Duration time);

  bool pays() const { return pays_; }

 private:
  double rate() const { return bytes_ / seconds_; }
  void forget();  // what is long ago counts less

  // Bytes that the compressor's rate is taken over, and what is assumed of it at first.
  static constexpr double kMemory = 16 << 20;
  static constexpr double kAssumedRate = 1.5e9;

  const int connections_;
  Link last_;
  double bytes_ = kMemory;  // given to the compressor
  double seconds_ = kMemory / kAssumedRate;
  bool pays_ = false;
};

}  // namespace lockstep
