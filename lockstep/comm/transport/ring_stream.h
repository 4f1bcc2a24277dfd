#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "lockstep/base/descriptor.h"
#include "lockstep/comm/transport/stream.h"

namespace lockstep {

// A ring of bytes with one writer and one reader, in memory that both see: threads of a process or
// processes that map the same segment. All zero is the empty ring, so that a fresh mapping is one.
struct ByteRing {
  static constexpr std::size_t kCapacity = 512 * 1024;  // a power of two

  alignas(64) std::atomic<std::uint64_t> written;
  std::atomic<std::uint32_t> reader_sleeps;
  alignas(64) std::atomic<std::uint64_t> read;
  std::atomic<std::uint32_t> writer_sleeps;
  std::atomic<std::uint32_t> closed;
  alignas(64) std::byte data[kCapacity];
};

// Both directions between two ranks.
struct RingPair {
  ByteRing rings[2];
};

// The eventfds of a ring: its writer rings `data` when the reader sleeps, its reader `room` when
// the writer sleeps.
struct RingBells {
  Descriptor data;
  Descriptor room;
};

// Throws Error{kIo}.
std::shared_ptr<const RingBells> make_ring_bells();
// Those that a peer has sent. Throws Error{kUnexpectedMessage} unless they are eventfds that do not
// block: anything else could hold up who rings them, or waits, beyond every deadline.
std::shared_ptr<const RingBells> received_ring_bells(Descriptor data, Descriptor room);

// One end of a RingPair: writes ring `side`, reads the other.
class RingStream final : public Stream {
 public:
  // `memory` keeps the pair mapped. `out` are the bells of the ring we write.
  RingStream(std::shared_ptr<RingPair> memory, int side, std::shared_ptr<const RingBells> out,
             std::shared_ptr<const RingBells> in);
  // Tells the peer that nothing more will come.
  ~RingStream() override;

  std::size_t write_some(std::span<const std::byte> head, std::span<const std::byte> body) override;
  std::size_t read_some(std::span<std::byte> head, std::span<std::byte> body) override;
  bool prepare_wait(Direction direction, std::vector<pollfd>& fds) override;
  void finish_wait(Direction direction) override;

 private:
  const std::shared_ptr<RingPair> memory_;
  ByteRing& out_;
  ByteRing& in_;
  const std::shared_ptr<const RingBells> out_bells_;
  const std::shared_ptr<const RingBells> in_bells_;
};

}  // namespace lockstep
