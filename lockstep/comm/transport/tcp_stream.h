#pragma once

#include <chrono>
#include <mutex>
#include <string_view>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/transport/compression_gauge.h"
#include "lockstep/comm/transport/stream.h"
#include "lockstep/comm/types.h"
#include "lockstep/net/socket/socket.h"

namespace lockstep {

// The congestion control that a connection takes instead of the system's; empty: it keeps that one.
// On one host nothing is in the way. On a short path BBR gives connections that share a port uneven
// rates; on a long one it is there for a reason. See docs/decisions/tcp_writes.md. Pure.
std::string_view congestion_control_for(bool on_one_host, std::chrono::microseconds round_trip,
                                        std::string_view of_system);

// A connected TCP socket as a Stream; between hosts its bytes are records (net/socket/records.h),
// compressed as `compression` says. `connections`: how many such streams a thread serves at the
// same time. The peer is out of reach when its host has acknowledged nothing for `timeout` while
// something was under way to it. (TCP_USER_TIMEOUT would be simpler, but also ends connections
// whose peer is alive and just does not read for a while.)
class TcpStream final : public Stream {
 public:
  TcpStream(Socket socket, Deadline::Clock::duration timeout,
            WireCompression compression = WireCompression::kOff, int connections = 1);

  std::size_t write_some(std::span<const std::byte> head, std::span<const std::byte> body) override;
  std::size_t read_some(std::span<std::byte> head, std::span<std::byte> body) override;
  bool prepare_wait(Direction direction, std::vector<pollfd>& fds) override;
  void finish_wait(Direction) override {}
  void check_reach() override;

 private:
  std::size_t write_records(std::span<const std::byte> head, std::span<const std::byte> body);
  void look_at_link();
  std::size_t read_records(std::span<std::byte> head, std::span<std::byte> body);

  const Socket socket_;
  const Deadline::Clock::duration timeout_;
  const std::size_t most_at_once_;  // bytes of a write
  const bool measures_link_;        // to decide about compression

  CompressionGauge gauge_;              // of the thread that writes
  std::size_t written_since_look_ = 0;  // likewise

  // Readers and writers both look.
  std::mutex mutex_;
  std::uint64_t acknowledged_ = 0;                  // guarded by mutex_: bytes, when last looked at
  Deadline::Clock::time_point unanswered_since_{};  // guarded by mutex_: zero if nothing is
};

}  // namespace lockstep
