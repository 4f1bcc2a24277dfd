#include "lockstep/server/frame_socket.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "lockstep/base/check.h"

namespace lockstep {
namespace {

constexpr std::size_t kLengthBytes = 4;
// Calls of just under 64 KiB, the largest packet of loopback, are the fastest and steadiest.
constexpr std::size_t kMostAtOnce = 60 * 1024;
// Up to this, one copy is cheaper than several calls and packets.
constexpr std::size_t kJoinBytes = 16 * 1024;
// So few bytes are moved to the front of the window whenever it is read into; elements that follow
// them are then aligned.
constexpr std::size_t kFewBytes = 64;

void append(std::vector<std::byte>& to, std::span<const std::byte> bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}

}  // namespace

FrameSocket::FrameSocket(Socket socket, std::size_t window, std::uint32_t most,
                         std::span<const std::byte> received)
    : socket_(std::move(socket)), most_(most) {
  set_window(std::max(window, 2 * received.size()));
  if (!received.empty()) std::memcpy(bytes_.get(), received.data(), received.size());
  end_ = received.size();
}

void FrameSocket::set_window(std::size_t bytes) {
  if (bytes <= window_) return;
  const std::size_t rounded = (bytes + kFewBytes - 1) / kFewBytes * kFewBytes;
  Bytes larger(static_cast<std::byte*>(std::aligned_alloc(kFewBytes, rounded)));
  if (!larger) throw std::bad_alloc();
  if (end_ > begin_) std::memcpy(larger.get(), bytes_.get() + begin_, end_ - begin_);
  end_ -= std::exchange(begin_, 0);
  bytes_ = std::move(larger);
  window_ = rounded;
}

void FrameSocket::queue(Outgoing frame) {
  if (!sends_) return;
  if (frame.size() <= kJoinBytes && frame.size() > frame.head.size()) {
    append(frame.head, frame.body);
    append(frame.head, frame.foot);
    frame = {std::move(frame.head), {}, {}, {}};
  }
  queued_bytes_ += frame.size();
  queue_.push_back(std::move(frame));
}

std::size_t FrameSocket::flush(std::size_t most) {
  std::size_t moved = 0;
  while (!queue_.empty() && moved < most) {
    const Outgoing& front = queue_.front();
    std::size_t at = sent_of_front_;
    std::span<const std::byte> part;
    for (const std::span<const std::byte> each :
         {std::span(front.head), front.body, std::span(front.foot)}) {
      if (at < each.size()) {
        part = each.subspan(at);
        break;
      }
      at -= each.size();
    }
    const auto sent = socket_.try_send(part.first(std::min(part.size(), kMostAtOnce)));
    if (!sent) break;
    moved += *sent;
    queued_bytes_ -= *sent;
    sent_of_front_ += *sent;
    if (sent_of_front_ < front.size()) continue;
    sent_of_front_ = 0;
    queue_.pop_front();
  }
  return moved;
}

void FrameSocket::flush_while_open(std::size_t most) {
  try {
    flush(most);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kChannelClosed) {
      throw Error(ErrorCode::kPeerLost, std::string(error.message()));
    }
    stop_sending();
  }
}

void FrameSocket::drop_unsent() {
  const bool begun = sent_of_front_ > 0 || socket_.midway();
  while (queue_.size() > (begun ? 1 : 0)) {
    queued_bytes_ -= queue_.back().size();
    queue_.pop_back();
  }
}

void FrameSocket::stop_sending() {
  sends_ = false;
  queue_.clear();
  queued_bytes_ = sent_of_front_ = 0;
}

std::size_t FrameSocket::receive(std::span<std::byte> to) {
  if (ended_ || to.empty()) return 0;
  try {
    return socket_.try_recv(to).value_or(0);
  } catch (const Error& error) {
    ended_ = error;
    return 0;
  }
}

void FrameSocket::make_room() {
  const std::size_t size = end_ - begin_;
  if (begin_ == 0 || (size >= kFewBytes && window_ - end_ >= window_ / 2)) return;
  std::memmove(bytes_.get(), bytes_.get() + begin_, size);
  begin_ = 0;
  end_ = size;
}

std::size_t FrameSocket::fill(std::size_t most) {
  make_room();
  const std::size_t got = receive({bytes_.get() + end_, std::min(most, window_ - end_)});
  end_ += got;
  return got;
}

bool FrameSocket::awaits_more() const {
  const std::uint64_t here = end_ - begin_;
  if (head_) return here < elements_left_ * element() + foot_bytes(*head_);
  if (here < kFrameStartBytes) return here > 0;
  const auto frame = decode_frame_start(raw().first<kFrameStartBytes>());
  return frame && here - kLengthBytes < frame->length;
}

void FrameSocket::consume(std::size_t bytes) {
  LOCKSTEP_CHECK(bytes <= end_ - begin_);
  begin_ += bytes;
  if (begin_ == end_) begin_ = end_ = 0;
}

std::optional<FrameStart> FrameSocket::start() const {
  LOCKSTEP_CHECK(!head_);
  const auto zero = [](std::byte byte) { return byte == std::byte{0}; };
  if (raw().size() >= kLengthBytes && std::ranges::all_of(raw().first(kLengthBytes), zero)) {
    refuse(ErrorCode::kUnexpectedMessage, "sent a frame of length 0; even the shortest has a tag");
  }
  if (raw().size() < kFrameStartBytes) return std::nullopt;
  const auto start = decode_frame_start(raw().first<kFrameStartBytes>());
  if (!start) {
    refuse(ErrorCode::kUnexpectedMessage,
           fmt::format("sent what is no message: tag {:#04x}",
                       std::to_integer<unsigned>(raw()[kLengthBytes])));
  }
  const std::uint32_t most = is_bulk(start->tag) ? most_ : kMaxSmallFrame;
  if (start->length > most) {
    refuse(ErrorCode::kMessageTooLarge, fmt::format("announced a {} of {} bytes; {} are allowed",
                                                    to_string(start->tag), start->length, most));
  }
  return start;
}

std::optional<SmallMessage> FrameSocket::take_small() {
  const auto frame = start();
  LOCKSTEP_CHECK(frame && !is_bulk(frame->tag));
  if (raw().size() - kLengthBytes < frame->length) return std::nullopt;
  auto message = decode_small(raw().subspan(kLengthBytes, frame->length));
  if (!message) {
    refuse(ErrorCode::kUnexpectedMessage,
           fmt::format("sent a malformed {}", to_string(frame->tag)));
  }
  consume(kLengthBytes + frame->length);
  return message;
}

bool FrameSocket::open_bulk() {
  const auto frame = start();
  LOCKSTEP_CHECK(frame && is_bulk(frame->tag));
  HeadResult result = decode_head(raw().subspan(kLengthBytes), frame->length);
  if (result.state == HeadResult::State::kIncomplete) return false;
  if (result.state == HeadResult::State::kMalformed) {
    refuse(ErrorCode::kUnexpectedMessage,
           fmt::format("sent a malformed {}", to_string(frame->tag)));
  }
  consume(kLengthBytes + result.size);
  head_ = std::move(result.head);
  elements_left_ = head_->count;
  return true;
}

std::size_t FrameSocket::elements_here() const {
  return static_cast<std::size_t>(
      std::min<std::uint64_t>(elements_left_, (end_ - begin_) / element()));
}

void FrameSocket::consume_elements(std::size_t count) {
  LOCKSTEP_CHECK(count <= elements_left_);
  consume(count * element());
  elements_left_ -= count;
}

std::size_t FrameSocket::read_elements(std::span<std::byte> to, std::size_t& done) {
  const auto bytes = to.subspan(done);
  const std::size_t buffered = std::min(bytes.size(), end_ - begin_);
  if (buffered > 0) {
    std::memcpy(bytes.data(), elements(), buffered);
    consume(buffered);
  }
  const std::size_t direct = receive(bytes.subspan(buffered));
  done += buffered + direct;
  elements_left_ = to.size() / element() - done / element();
  return direct;
}

std::optional<BulkFoot> FrameSocket::foot_at(std::size_t offset) const {
  const std::size_t size = foot_bytes(*head_);
  if (raw().size() < offset + size) return std::nullopt;
  return decode_foot(*head_, raw().subspan(offset, size));
}

std::optional<BulkFoot> FrameSocket::take_foot() {
  LOCKSTEP_CHECK(head_ && elements_left_ == 0);
  auto foot = foot_at(0);
  if (!foot) return std::nullopt;
  consume(foot_bytes(*head_));
  head_.reset();
  return foot;
}

std::optional<BulkFoot> FrameSocket::peek_foot() const {
  return foot_at(static_cast<std::size_t>(elements_left_) * element());
}

void FrameSocket::refuse(ErrorCode code, const std::string& what) const {
  throw Error(code, fmt::format("{} {}", socket_.peer(), what), socket_.peer_rank());
}

}  // namespace lockstep
