#include "lockstep/server/lobby.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/log.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// Strangers may hold this many connections open; then the oldest has to go.
constexpr std::size_t kMostGuests = 1024;
// A worker's first messages arrive within this, however long the job's timeout is.
constexpr Deadline::Clock::duration kLongestHandshake = 10s;
constexpr Deadline::Clock::duration kAcceptPause = 100ms;
constexpr std::size_t kGuestWindow = 48 * 1024;  // more than twice any of their messages
constexpr std::size_t kReadBytes = 16 * 1024;
constexpr std::uint32_t kNoGradients = 0;

}  // namespace

Lobby::Lobby(std::optional<Socket> listener, LobbyOptions options)
    : options_(std::move(options)), listener_(std::move(listener)) {}

void Lobby::adopt(Socket socket, int place) {
  guests_.push_back({.channel = FrameChannel(std::move(socket), kGuestWindow, kNoGradients),
                     .limit = Deadline::after(options_.timeout).time(),
                     .opening = Opening::kHandshake,
                     .handshake = {},
                     .admitted = true,
                     .place = place});
}

void Lobby::add_poll(std::vector<pollfd>& entries) const {
  entries.push_back({listener_ && accepting_ ? listener_->fd() : -1, POLLIN, 0});
  for (const Guest& guest : guests_) {
    const short events = guest.channel.wants_to_send() ? POLLIN | POLLOUT : POLLIN;
    entries.push_back({guest.channel.socket().fd(), events, 0});
  }
}

Lobby::Clock::time_point Lobby::wake_at() const {
  auto wake = accepting_ ? Clock::time_point::max() : Clock::now() + kAcceptPause;
  for (const Guest& guest : guests_) wake = std::min(wake, guest.limit);
  return wake;
}

std::vector<Lobby::Candidate> Lobby::serve(std::span<const pollfd> entries) {
  const auto now = Clock::now();
  std::vector<Candidate> candidates;
  auto entry = entries.begin() + 1;
  for (auto guest = guests_.begin(); guest != guests_.end();) {
    const bool ready = (entry++)->revents != 0;
    bool done = now >= guest->limit;
    try {
      if (ready) attend(*guest, candidates);
      if (guest->channel.socket()) guest->channel.flush(kReadBytes);
      done = done || !guest->channel.socket() || guest->channel.ended() ||
             (guest->leaving && !guest->channel.wants_to_send());
    } catch (const Error& error) {
      warn(fmt::format("let {} go: {}", guest->channel.socket().peer(), error.message()));
      done = true;
    }
    if (done) guest->channel.socket().close_gently();
    guest = done ? guests_.erase(guest) : std::next(guest);
  }
  accepting_ = true;
  if (entries.front().revents != 0) accept_guests(now);
  return candidates;
}

void Lobby::accept_guests(Clock::time_point now) {
  constexpr int kAtOnce = 64;
  for (int i = 0; i < kAtOnce; ++i) {
    std::optional<Socket> socket;
    try {
      socket = try_accept(*listener_);
    } catch (const Error& error) {
      // Most likely no descriptors are left. Make room, then breathe before the next attempt.
      warn(error.message());
      drop_oldest(now);
      accepting_ = false;
      return;
    }
    if (!socket) return;
    tune_tcp(*socket, options_.timeout);
    if (guests_.size() >= kMostGuests) guests_.pop_front();
    guests_.push_back({.channel = FrameChannel(std::move(*socket), kGuestWindow, kNoGradients),
                       .limit = now + std::min(options_.timeout, kLongestHandshake),
                       .handshake = {}});
  }
}

void Lobby::drop_oldest(Clock::time_point now) {
  const auto oldest =
      std::ranges::find_if(guests_, [&](const Guest& guest) { return guest.limit > now; });
  if (oldest != guests_.end()) oldest->limit = now;
}

void Lobby::warn(std::string_view text) {
  if (warnings_left_-- > 0) log(LogLevel::kWarning, "coordinator: {}", text);
}

void Lobby::attend(Guest& guest, std::vector<Candidate>& candidates) {
  guest.channel.fill(kReadBytes);
  if (guest.leaving) return guest.channel.consume(guest.channel.raw().size());
  if (!guest.admitted) {
    recognise(guest);
    while (guest.opening == Opening::kHandshake && !guest.admitted && shake_hands(guest)) {
    }
  }
  if (!guest.admitted || guest.leaving) return;
  const auto start = guest.channel.start();
  if (!start) return;
  if (start->tag != WireTag::kJoinRequest) {
    throw Error(ErrorCode::kUnexpectedMessage,
                fmt::format("it sent a {} before it joined", to_string(start->tag)));
  }
  if (auto message = guest.channel.take_small()) {
    candidates.push_back({std::move(guest.channel), std::get<JoinRequest>(std::move(*message)),
                          guest.opening == Opening::kHandshake, guest.place});
  }
}

void Lobby::recognise(Guest& guest) {
  if (guest.opening != Opening::kUndecided) return;
  guest.opening = recognise_opening(guest.channel.raw());
  if (guest.opening == Opening::kStranger) {
    throw Error(ErrorCode::kUnexpectedMessage, "it does not speak our protocol");
  }
  if (guest.opening != Opening::kJoinRequest) return;
  if (!options_.identity.token.empty() && !options_.insecure) {
    throw Error(ErrorCode::kAuthentication,
                "it proves no token (the original protocol has none; --insecure lets it in)");
  }
  guest.admitted = true;
}

// Whether there was a message to act on.
bool Lobby::shake_hands(Guest& guest) {
  const auto bytes = guest.channel.raw();
  if (bytes.size() < kMessageHeaderBytes || guest.leaving) return false;
  Handshake::Step step;
  try {
    const MessageHeader header = parse_header(bytes.first<kMessageHeaderBytes>(), kMaxHandshakeBody,
                                              guest.channel.socket().peer());
    if (bytes.size() - kMessageHeaderBytes < header.length) return false;
    const auto body = bytes.subspan(kMessageHeaderBytes, header.length);
    const Message message{header.kind, {body.begin(), body.end()}};
    guest.channel.consume(kMessageHeaderBytes + header.length);
    if (!guest.handshake) guest.handshake.emplace(make_handshake(message));
    step = guest.handshake->receive(message);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kVersionMismatch) throw;
    // It cannot read our messages, but its decoder finds our version in this one's header.
    step = {frame(MessageKind::kRefusal, encode_wire_error(error)), error};
  }
  if (!step.reply.empty()) guest.channel.queue(std::move(step.reply));
  if (step.failure) {
    warn(fmt::format("turned {} away: {}", guest.channel.socket().peer(), step.failure->message()));
    guest.leaving = true;
  }
  guest.admitted = guest.handshake && guest.handshake->done();
  return true;
}

Handshake Lobby::make_handshake(const Message& first) const {
  Identity identity = options_.identity;
  if (options_.insecure && first.kind == MessageKind::kHello) {
    const auto hello = decode_hello(first.body);
    if (hello && !hello->has_token) identity.token.clear();
  }
  return {Handshake::Role::kServer, identity, Purpose::kServer};
}

void Lobby::turn_away(Candidate candidate, const Error& reason) {
  warn(fmt::format("turned {} ({}) away: {}", candidate.request.node_id,
                   candidate.channel.socket().peer(), reason.message()));
  if (!candidate.ours) return candidate.channel.socket().close_gently();
  candidate.channel.queue(
      encode(Refusal{{reason.code(), reason.rank(), std::string(reason.message())}}));
  guests_.push_back({.channel = std::move(candidate.channel),
                     .limit = Clock::now() + std::min(options_.timeout, kLongestHandshake),
                     .handshake = {},
                     .leaving = true});
}

}  // namespace lockstep
