#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/descriptor.h"
#include "lockstep/base/failure_latch.h"
#include "lockstep/net/socket/address.h"
#include "lockstep/net/socket/records.h"

namespace lockstep {

// A stream socket, always non-blocking and close-on-exec. It knows who is at the other end, so that
// every error names it. One thread may send while another receives.
//
// Blocking calls wait until the deadline (Error{kTimeout}) or until `latch`, if given, trips (then
// they throw its error). A peer that closed or reset is Error{kChannelClosed}, one that no longer
// answers Error{kPeerLost}. The rest is Error{kIo} without a rank: this process's own trouble, such
// as too few descriptors.
//
// Once it is protected, all bytes travel as records (records.h). A call that sends may then have to
// be repeated: after nothing was sent, the next call must begin with the same bytes.
class Socket {
 public:
  Socket() = default;
  explicit Socket(Descriptor descriptor, std::string peer = "unknown peer", int peer_rank = -1);

  int fd() const { return descriptor_.get(); }
  explicit operator bool() const { return static_cast<bool>(descriptor_); }
  Descriptor release() && { return std::move(descriptor_); }

  // The other end as messages call it: "rank 2 (10.0.0.3:4711)".
  const std::string& peer() const { return peer_; }
  int peer_rank() const { return peer_rank_; }
  void set_peer(std::string name, int rank);

  // From now on, both ways. Nothing that was sent before is on its way.
  void protect(std::unique_ptr<Records> records) { records_ = std::move(records); }
  // Null where bytes travel as they are.
  Records* records() const { return records_.get(); }
  // Bytes have come that poll() does not tell of any more.
  bool buffered() const { return records_ && records_->opener.ready(); }
  // Some bytes have gone out of which try_send() has not told yet; see above.
  bool midway() const { return records_ && !records_->sealer.unsent().empty(); }

  void send_all(std::span<const std::byte> bytes, Deadline deadline,
                const FailureLatch* latch = nullptr) const;
  void recv_all(std::span<std::byte> bytes, Deadline deadline,
                const FailureLatch* latch = nullptr) const;

  // One system call that never blocks: the number of bytes moved (at least one, unless `bytes` is
  // empty), or nothing if it would have to wait.
  std::optional<std::size_t> try_send(std::span<const std::byte> bytes) const;
  // Sends what can be sent at once and ignores errors: for last words to a peer that may be gone.
  void send_if_heard(std::span<const std::byte> bytes) const noexcept;
  std::optional<std::size_t> try_recv(std::span<std::byte> bytes) const;

  SocketAddress local_address() const;
  SocketAddress peer_address() const;

  // Everything sent reaches the peer before it sees the end, and what it sent is thrown away.
  // Closing with unread bytes would reset the connection instead. Never blocks.
  void close_gently();

 private:
  std::optional<std::size_t> try_send_raw(std::span<const std::byte> bytes) const;
  std::optional<std::size_t> try_recv_raw(std::span<std::byte> bytes) const;
  std::size_t open_records(std::span<std::byte> bytes) const;

  Descriptor descriptor_;
  std::string peer_;
  int peer_rank_ = -1;
  std::unique_ptr<Records> records_;
};

// Waits until poll() reports one of `events` (or an error, which the next call will find) on `fd`.
// `what` describes the wait for the message of Error{kTimeout}, `rank` is the rank it blames.
void wait_for(int fd, short events, Deadline deadline, const FailureLatch* latch,
              std::string_view what, int rank = -1);

// Port 0 lets the system choose; local_address() tells. "::" serves IPv4 as well.
Socket listen_tcp(const SocketAddress& address);

// The next connection, or nothing if none is waiting. Connections that died in the queue are
// skipped.
std::optional<Socket> try_accept(const Socket& listener);
Socket accept(const Socket& listener, Deadline deadline, const FailureLatch* latch = nullptr);

// One attempt. Refused or out of reach: Error{kNoConnection}.
Socket connect_tcp(const SocketAddress& address, Deadline deadline,
                   const FailureLatch* latch = nullptr);

// Tries every address of the host, again and again, until one answers: the peer may not have
// started yet, its name not yet be known. The error at the deadline tells the last cause.
Socket connect_with_retry(const HostPort& where, Deadline deadline,
                          const FailureLatch* latch = nullptr);

// No delay for small messages; an idle connection whose peer's host no longer answers fails after
// `timeout` or a few seconds (zero: the system's own patience).
void tune_tcp(const Socket& socket, Deadline::Clock::duration timeout);

}  // namespace lockstep
