#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lockstep {

enum class Direction : std::uint8_t { kSend, kRecv };

// A two-way byte stream to one peer that never blocks. At most one thread reads and one
// writes at a time.
class Stream {
 public:
  virtual ~Stream() = default;

  // Writes what fits now, `head` first, and returns how many bytes (0: nothing fits).
  // Throws Error{kChannelClosed} or Error{kIo}.
  virtual std::size_t write_some(std::span<const std::byte> head,
                                 std::span<const std::byte> body) = 0;
  // Reads what is there now, into `head` first. Throws likewise.
  virtual std::size_t read_some(std::span<std::byte> head, std::span<std::byte> body) = 0;

  // Before sleeping until data (kRecv) or room (kSend) is there: adds what poll() shall wait for.
  // False if the stream may be ready already, so that there is no reason to sleep.
  virtual bool prepare_wait(Direction direction, std::vector<pollfd>& fds) = 0;
  virtual void finish_wait(Direction direction) = 0;

  // Called now and then while nothing moves. Throws Error{kPeerLost} if the peer's host has not
  // answered for too long.
  virtual void check_reach() {}
};

}  // namespace lockstep
