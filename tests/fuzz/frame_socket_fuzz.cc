// A worker's stream of frames as the gradient server takes it: through a small window, in pieces.
// The first byte chooses how the stream is cut and how its elements are taken. What comes out must
// be what the codec finds in the whole stream, up to the first thing that is no message.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "lockstep/base/error.h"
#include "lockstep/server/frame_socket.h"

using namespace lockstep;

namespace {

using Bytes = std::vector<std::byte>;
constexpr std::uint32_t kMost = 1 << 20;

void require(bool condition) {
  if (!condition) std::abort();
}

void append(Bytes& to, std::span<const std::byte> bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}

// Everything that is a whole message, encoded again.
Bytes expected(std::span<const std::byte> stream) {
  Bytes all;
  while (stream.size() >= kFrameStartBytes) {
    const auto start = decode_frame_start(stream.first<kFrameStartBytes>());
    if (!start || start->length > (is_bulk(start->tag) ? kMost : kMaxSmallFrame)) break;
    if (stream.size() - 4 < start->length) break;
    const auto body = stream.subspan(4, start->length);
    const bool valid = is_bulk(start->tag)
                           ? decode_head(body, start->length).state == HeadResult::State::kDone
                           : decode_small(body).has_value();
    if (!valid) break;
    append(all, stream.first(start->length + 4));
    stream = stream.subspan(start->length + 4);
  }
  return all;
}

class Receiver {
 public:
  Receiver(FrameSocket& channel, bool directly) : channel_(channel), directly_(directly) {}

  // Takes what is there. Throws Error for what is no message.
  void take_all() {
    while (channel_.bulk_is_open() ? take_gradient() : take_between()) {
    }
  }
  const Bytes& whole() const { return whole_; }

 private:
  bool take_between() {
    const auto start = channel_.start();
    if (!start) return false;
    if (is_bulk(start->tag)) {
      if (!channel_.open_bulk()) return false;
      head_ = channel_.head();
      open_ = encode_head(head_);
      done_ = 0;
      data_.clear();
      return true;
    }
    const auto message = channel_.take_small();
    if (message) append(whole_, encode(*message));
    return message.has_value();
  }

  bool take_gradient() {
    if (const auto foot = channel_.peek_foot()) require(!channel_.awaits_more());
    if (channel_.elements_left() > 0 && !take_elements()) return false;
    if (channel_.elements_left() > 0) return true;
    const auto foot = channel_.take_foot();
    if (!foot) return false;
    append(open_, data_);
    append(open_, encode_foot(head_, *foot));
    append(whole_, open_);
    return true;
  }

  // As the worker does it, or as the server.
  bool take_elements() {
    if (directly_) {
      data_.resize(head_.count * element_bytes(head_.tag));
      const std::size_t before = done_;
      channel_.read_elements(data_, done_);
      return done_ > before;
    }
    const std::size_t count = channel_.elements_here();
    const std::size_t before = data_.size();
    const std::size_t bytes = count * element_bytes(head_.tag);
    data_.resize(before + bytes);
    if (count > 0) std::memcpy(&data_[before], channel_.elements(), bytes);
    channel_.consume_elements(count);
    return count > 0;
  }

  FrameSocket& channel_;
  const bool directly_;
  BulkHead head_;
  Bytes open_;  // the gradient that is being taken
  Bytes data_;
  std::size_t done_ = 0;  // bytes of it
  Bytes whole_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto stream = std::as_bytes(std::span(data, size)).subspan(1);
  const std::size_t piece = std::size_t{1} << (data[0] % 13);
  if (stream.size() / piece > 2000) return 0;  // slow, and tells nothing new

  int ends[2];
  require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  Descriptor sender(ends[0]);
  FrameSocket channel(Socket(Descriptor(ends[1]), "the peer", 1), 64 * 1024, kMost);
  Receiver receiver(channel, data[0] >= 128);
  bool malformed = false;
  try {
    for (std::size_t at = 0; at < stream.size(); at += piece) {
      const auto part = stream.subspan(at, std::min(piece, stream.size() - at));
      require(::send(sender.get(), part.data(), part.size(), MSG_NOSIGNAL) ==
              static_cast<ssize_t>(part.size()));
      channel.fill(part.size());
      receiver.take_all();
    }
  } catch (const Error&) {
    malformed = true;
  }
  const Bytes wanted = expected(stream);
  require(receiver.whole() == wanted);
  // Cut short, it waits for more; malformed, it says so; otherwise it has taken everything.
  if (!malformed) require(channel.awaits_more() == (wanted.size() < stream.size()));
  return 0;
}
