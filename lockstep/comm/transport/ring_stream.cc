#include "lockstep/comm/transport/ring_stream.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr std::size_t kMask = ByteRing::kCapacity - 1;

void copy_in(ByteRing& ring, std::uint64_t at, std::span<const std::byte> bytes) {
  const std::size_t begin = at & kMask;
  const std::size_t first = std::min(bytes.size(), ByteRing::kCapacity - begin);
  if (first > 0) std::memcpy(ring.data + begin, bytes.data(), first);
  if (bytes.size() > first) {
    std::memcpy(ring.data, bytes.data() + first, bytes.size() - first);
  }
}

void copy_out(const ByteRing& ring, std::uint64_t at, std::span<std::byte> bytes) {
  const std::size_t begin = at & kMask;
  const std::size_t first = std::min(bytes.size(), ByteRing::kCapacity - begin);
  if (first > 0) std::memcpy(bytes.data(), ring.data + begin, first);
  if (bytes.size() > first) {
    std::memcpy(bytes.data() + first, ring.data, bytes.size() - first);
  }
}

// The whole of `head`, then of `body`, cut to `room` bytes.
template <typename Byte>
std::pair<std::span<Byte>, std::span<Byte>> cut(std::span<Byte> head, std::span<Byte> body,
                                                std::size_t room) {
  head = head.first(std::min(head.size(), room));
  body = body.first(std::min(body.size(), room - head.size()));
  return {head, body};
}

void ring(const Descriptor& bell) {
  const std::uint64_t one = 1;
  // A full counter means the peer has been rung already.
  [[maybe_unused]] const ssize_t n = ::write(bell.get(), &one, sizeof one);
}

// Both counters lie in memory that the peer can write.
void check_fill(std::uint64_t bytes) {
  if (bytes > ByteRing::kCapacity) [[unlikely]] {
    throw Error(ErrorCode::kUnexpectedMessage, "its ring claims to hold more than fits");
  }
}

Descriptor make_bell() {
  Descriptor bell(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!bell) throw_io("eventfd", errno);
  return bell;
}

// Of a descriptor that came from a peer. Where there is no /proc nobody can tell what it is.
void require_bell(const Descriptor& bell) {
  std::error_code ignored;
  const std::string what =
      std::filesystem::read_symlink(fmt::format("/proc/self/fd/{}", bell.get()), ignored);
  const int flags = ::fcntl(bell.get(), F_GETFL);
  const bool blocks = flags < 0 || (flags & O_NONBLOCK) == 0;
  if (!blocks && (what.empty() || what == "anon_inode:[eventfd]")) return;
  throw Error(
      ErrorCode::kUnexpectedMessage,
      fmt::format("it sent {}{} where an eventfd that does not block belongs",
                  what.empty() ? "a descriptor" : visible(what), blocks ? ", which blocks," : ""));
}

}  // namespace

std::shared_ptr<const RingBells> make_ring_bells() {
  return std::make_shared<const RingBells>(RingBells{make_bell(), make_bell()});
}

std::shared_ptr<const RingBells> received_ring_bells(Descriptor data, Descriptor room) {
  require_bell(data);
  require_bell(room);
  return std::make_shared<const RingBells>(RingBells{std::move(data), std::move(room)});
}

RingStream::RingStream(std::shared_ptr<RingPair> memory, int side,
                       std::shared_ptr<const RingBells> out, std::shared_ptr<const RingBells> in)
    : memory_(std::move(memory)),
      out_(memory_->rings[side]),
      in_(memory_->rings[1 - side]),
      out_bells_(std::move(out)),
      in_bells_(std::move(in)) {}

RingStream::~RingStream() {
  out_.closed.store(1, std::memory_order_seq_cst);
  ring(out_bells_->data);
  ring(in_bells_->room);
}

std::size_t RingStream::write_some(std::span<const std::byte> head,
                                   std::span<const std::byte> body) {
  if (in_.closed.load(std::memory_order_acquire) != 0) {
    throw Error(ErrorCode::kChannelClosed, "the peer has left");
  }
  const std::uint64_t at = out_.written.load(std::memory_order_relaxed);
  const std::uint64_t used = at - out_.read.load(std::memory_order_acquire);
  check_fill(used);
  std::tie(head, body) = cut(head, body, ByteRing::kCapacity - used);
  const std::size_t total = head.size() + body.size();
  if (total == 0) return 0;
  copy_in(out_, at, head);
  copy_in(out_, at + head.size(), body);
  // Sequentially consistent, as is the sleeper's flag: one of the two sees the other.
  out_.written.store(at + total, std::memory_order_seq_cst);
  if (out_.reader_sleeps.load(std::memory_order_seq_cst) != 0) ring(out_bells_->data);
  return total;
}

std::size_t RingStream::read_some(std::span<std::byte> head, std::span<std::byte> body) {
  // Read before `written`: a peer closes only after its last byte.
  const bool closed = in_.closed.load(std::memory_order_acquire) != 0;
  const std::uint64_t at = in_.read.load(std::memory_order_relaxed);
  const std::uint64_t there = in_.written.load(std::memory_order_acquire) - at;
  check_fill(there);
  if (there == 0 && closed) throw Error(ErrorCode::kChannelClosed, "the peer has left");
  std::tie(head, body) = cut(head, body, there);
  const std::size_t total = head.size() + body.size();
  if (total == 0) return 0;
  copy_out(in_, at, head);
  copy_out(in_, at + head.size(), body);
  in_.read.store(at + total, std::memory_order_seq_cst);
  if (in_.writer_sleeps.load(std::memory_order_seq_cst) != 0) ring(in_bells_->room);
  return total;
}

bool RingStream::prepare_wait(Direction direction, std::vector<pollfd>& fds) {
  const bool closed = in_.closed.load(std::memory_order_seq_cst) != 0;
  if (direction == Direction::kRecv) {
    fds.push_back({in_bells_->data.get(), POLLIN, 0});
    in_.reader_sleeps.store(1, std::memory_order_seq_cst);
    return !closed &&
           in_.written.load(std::memory_order_seq_cst) == in_.read.load(std::memory_order_relaxed);
  }
  fds.push_back({out_bells_->room.get(), POLLIN, 0});
  out_.writer_sleeps.store(1, std::memory_order_seq_cst);
  return !closed &&
         out_.written.load(std::memory_order_relaxed) - out_.read.load(std::memory_order_seq_cst) ==
             ByteRing::kCapacity;
}

void RingStream::finish_wait(Direction direction) {
  const bool receiving = direction == Direction::kRecv;
  (receiving ? in_.reader_sleeps : out_.writer_sleeps).store(0, std::memory_order_relaxed);
  std::uint64_t count = 0;
  [[maybe_unused]] const ssize_t n =
      ::read((receiving ? in_bells_->data : out_bells_->room).get(), &count, sizeof count);
}

}  // namespace lockstep
