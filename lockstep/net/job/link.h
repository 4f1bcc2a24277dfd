#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <span>

#include "lockstep/net/socket/socket.h"
#include "lockstep/wire/message.h"

namespace lockstep {

// The control connection of a member to the centre: messages over a socket, for an event loop. (The
// handshakes of other connections use it, too.) Whatever goes wrong is kept in failure() and is
// seen after everything that arrived before it. Used by one thread.
class Link {
 public:
  // Bodies over `most` bytes are refused.
  Link(Socket socket, std::size_t most) : socket_(std::move(socket)), most_(most) {}

  // To be sent by flush().
  void queue(SharedBytes bytes);

  // Move what can be moved without waiting.
  void flush();
  void pump();
  // The next message that has arrived, if any.
  std::optional<Message> next();
  // What has arrived and is no whole message yet.
  std::span<const std::byte> rest() const { return received_.rest(); }

  // Set once: the peer closed, the connection broke or what it sent is not ours.
  const std::optional<Error>& failure() const { return failure_; }
  // Nothing more will arrive; next() may still have some.
  bool ended() const { return ended_; }
  bool wants_to_send() const { return !queue_.empty() && !failure_; }

  // The same, but these wait. They throw the failure.
  void send(MessageKind kind, std::span<const std::byte> body, Deadline deadline);
  Message receive(Deadline deadline);

  void set_limit(std::size_t most) { most_ = most; }
  Socket& socket() { return socket_; }
  const Socket& socket() const { return socket_; }

 private:
  void fail(const Error& error);

  Socket socket_;
  std::size_t most_;
  MessageBuffer received_;
  std::deque<SharedBytes> queue_;
  std::size_t queued_bytes_ = 0;
  std::size_t sent_of_front_ = 0;
  bool ended_ = false;  // nothing more will be read
  std::optional<Error> end_;
  std::optional<Error> failure_;
};

}  // namespace lockstep
