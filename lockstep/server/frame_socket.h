#pragma once

#include <cstddef>
#include <cstdlib>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/net/socket/socket.h"
#include "lockstep/wire/gradient_messages.h"

namespace lockstep {

// So much is read from a peer, or sent to it, before the next has its turn: what all have sent then
// fits the second-level cache.
inline constexpr std::size_t kTurnBytes = 256 * 1024;

// Frames of the gradient protocol over a socket, for an event loop: never waits. Bulk messages are
// never held whole; what arrives goes through a window, from which it is taken piece by piece.
// Used by one thread at a time.
//
// Errors name the peer (the socket's) and are thrown: Error{kChannelClosed} or {kIo} by flush(),
// Error{kUnexpectedMessage} or {kMessageTooLarge} by whatever looks at malformed bytes.
class FrameSocket {
 public:
  // `window` bytes may arrive ahead of being taken; frames over `most` bytes are refused.
  // `received` has come already.
  FrameSocket(Socket socket, std::size_t window, std::uint32_t most,
              std::span<const std::byte> received = {});

  Socket& socket() { return socket_; }
  const Socket& socket() const { return socket_; }
  std::size_t window() const { return window_; }
  void set_window(std::size_t bytes);  // grows only
  void set_largest_frame(std::uint32_t most) { most_ = most; }

  // What is to be sent: `head`, then `body` (kept alive by `keep`, or by the caller), then `foot`.
  struct Outgoing {
    std::vector<std::byte> head;
    std::span<const std::byte> body;
    std::vector<std::byte> foot;
    std::shared_ptr<const void> keep;

    std::size_t size() const { return head.size() + body.size() + foot.size(); }
  };
  void queue(Outgoing frame);
  void queue(std::vector<std::byte> frame) { queue(Outgoing{std::move(frame), {}, {}, {}}); }
  bool wants_to_send() const { return !queue_.empty(); }
  std::size_t queued_bytes() const { return queued_bytes_; }
  // Sends what can be sent without waiting, about `most` bytes, and returns how many.
  std::size_t flush(std::size_t most);
  // The same for a peer whose last words matter: once it has closed, nothing goes out any more, and
  // what it sent before is still to be read. Error{kPeerLost} for all else.
  void flush_while_open(std::size_t most);
  // Forgets what has not begun to go out.
  void drop_unsent();
  // Nothing goes out any more, neither what is queued nor what will be.
  void stop_sending();

  // Reads once into the window, up to `most` bytes; returns how many bytes. The end of the stream
  // is kept in end().
  std::size_t fill(std::size_t most);
  // The window has so little room that nothing is to be read until something is taken.
  bool full() const { return window_ - (end_ - begin_) < window_ / 2; }
  // Something has come that poll() does not tell of: fill() will find it at once.
  bool buffered() const { return socket_.buffered(); }
  // Why nothing more will come. What came before is still to be taken.
  const std::optional<Error>& ended() const { return ended_; }
  // A frame has begun to arrive and more of it is to come.
  bool awaits_more() const;
  // All of the message at the front has arrived, or of the one that is open.
  bool has_whole_message() const { return !awaits_more() && (head_ || begin_ < end_); }

  // Bytes that are no frames: the handshake's.
  std::span<const std::byte> raw() const { return {bytes_.get() + begin_, end_ - begin_}; }
  void consume(std::size_t bytes);

  // The frame at the front, as soon as its first bytes are there. Not while a bulk message is open.
  std::optional<FrameStart> start() const;
  // All of a small message, once it is there; start() tells that it is one.
  std::optional<SmallMessage> take_small();
  // The head of a bulk message, once it is there: opens it. Until take_foot() it is what comes
  // next.
  bool open_bulk();
  bool bulk_is_open() const { return head_.has_value(); }
  const BulkHead& head() const { return *head_; }
  // Elements of the open message: those still to be taken, and those of them that are here.
  std::uint64_t elements_left() const { return elements_left_; }
  std::size_t elements_here() const;
  const std::byte* elements() const { return bytes_.get() + begin_; }
  void consume_elements(std::size_t count);
  // Takes elements, past the window where it is empty; returns how many bytes. `done` counts them.
  std::size_t read_elements(std::span<std::byte> to, std::size_t& done);
  // The foot, once all before it is taken: closes the message.
  std::optional<BulkFoot> take_foot();
  // The same while the elements are still in the window, if all are; closes nothing.
  std::optional<BulkFoot> peek_foot() const;

 private:
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  using Bytes = std::unique_ptr<std::byte[], Free>;

  std::size_t receive(std::span<std::byte> to);
  void make_room();
  std::optional<BulkFoot> foot_at(std::size_t offset) const;
  [[noreturn]] void refuse(ErrorCode code, const std::string& what) const;
  std::size_t element() const { return element_bytes(head_->tag); }

  Socket socket_;
  std::uint32_t most_;

  std::deque<Outgoing> queue_;
  std::size_t queued_bytes_ = 0;
  std::size_t sent_of_front_ = 0;
  bool sends_ = true;

  std::size_t window_ = 0;
  Bytes bytes_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
  std::optional<Error> ended_;
  std::optional<BulkHead> head_;
  std::uint64_t elements_left_ = 0;
};

}  // namespace lockstep
