#include "lockstep/net/job/link.h"

#include <fmt/format.h>
#include <poll.h>

#include <array>
#include <utility>

namespace lockstep {
namespace {

// A peer that does not read must not make us hold ever more for it.
constexpr std::size_t kMaxQueued = std::size_t{64} << 20;

}  // namespace

void Link::queue(SharedBytes bytes) {
  if (failure_) return;
  queued_bytes_ += bytes->size();
  queue_.push_back(std::move(bytes));
  if (queued_bytes_ > kMaxQueued) {
    fail(Error(ErrorCode::kPeerLost, fmt::format("{} does not read", socket_.peer()),
               socket_.peer_rank()));
  }
}

void Link::flush() {
  try {
    while (wants_to_send()) {
      const std::vector<std::byte>& front = *queue_.front();
      const auto sent = socket_.try_send(std::span(front).subspan(sent_of_front_));
      if (!sent) return;
      sent_of_front_ += *sent;
      if (sent_of_front_ < front.size()) continue;
      queued_bytes_ -= front.size();
      sent_of_front_ = 0;
      queue_.pop_front();
    }
  } catch (const Error& error) {
    // What the peer said before it closed is still to be read; that tells why, this does not.
    queue_.clear();
    end_ = error;
    pump();
    ended_ = true;
  }
}

void Link::pump() {
  // Bounded, so that one busy peer does not starve the rest.
  constexpr int kReads = 16;
  std::array<std::byte, 16384> chunk;
  try {
    // But what is here already nobody would tell us of again.
    for (int i = 0; (i < kReads || socket_.buffered()) && !ended_; ++i) {
      const auto received = socket_.try_recv(chunk);
      if (!received) return;
      received_.append(std::span(chunk).first(*received));
    }
  } catch (const Error& error) {
    ended_ = true;
    if (!end_) end_ = error;
  }
}

std::optional<Message> Link::next() {
  if (failure_) return std::nullopt;
  try {
    if (auto message = received_.next(most_, socket_.peer())) return message;
  } catch (const Error& error) {
    fail(error);
    return std::nullopt;
  }
  if (ended_) fail(*end_);
  return std::nullopt;
}

void Link::send(MessageKind kind, std::span<const std::byte> body, Deadline deadline) {
  socket_.send_all(frame(kind, body), deadline);
}

Message Link::receive(Deadline deadline) {
  while (true) {
    if (auto message = next()) return std::move(*message);
    if (failure_) throw Error(*failure_);
    wait_for(socket_.fd(), POLLIN, deadline, nullptr, fmt::format("waiting for {}", socket_.peer()),
             socket_.peer_rank());
    pump();
  }
}

void Link::fail(const Error& error) {
  if (!failure_) failure_ = error;
  queue_.clear();
  queued_bytes_ = 0;
}

}  // namespace lockstep
