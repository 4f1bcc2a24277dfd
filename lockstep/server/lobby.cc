#include "lockstep/server/lobby.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/log.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// Strangers may hold this many connections open; then the oldest has to go.
constexpr std::size_t kMostVisitors = 1024;
// A worker's first messages arrive within this, however long the job's timeout is.
constexpr Deadline::Clock::duration kLongestHandshake = 10s;
constexpr Deadline::Clock::duration kAcceptPause = 100ms;
constexpr std::size_t kVisitorWindow = 48 * 1024;  // more than twice any of their messages
constexpr std::size_t kReadBytes = 16 * 1024;
constexpr std::uint32_t kNoGradients = 0;

}  // namespace

Lobby::Lobby(std::optional<Socket> listener, LobbyOptions options)
    : options_(std::move(options)), listener_(std::move(listener)) {}

void Lobby::adopt(Socket socket, int place) {
  visitors_.push_back({.frames = FrameSocket(std::move(socket), kVisitorWindow, kNoGradients),
                       .limit = Deadline::after(options_.timeout).time(),
                       .opening = Opening::kHandshake,
                       .handshake = {},
                       .admitted = true,
                       .place = place});
}

void Lobby::add_poll(std::vector<pollfd>& entries) const {
  entries.push_back({listener_ && accepting_ ? listener_->fd() : -1, POLLIN, 0});
  for (const Visitor& visitor : visitors_) {
    const short events = visitor.frames.wants_to_send() ? POLLIN | POLLOUT : POLLIN;
    entries.push_back({visitor.frames.socket().fd(), events, 0});
  }
}

Lobby::Clock::time_point Lobby::wake_at() const {
  auto wake = accepting_ ? Clock::time_point::max() : Clock::now() + kAcceptPause;
  for (const Visitor& visitor : visitors_) wake = std::min(wake, visitor.limit);
  return wake;
}

std::vector<Lobby::Candidate> Lobby::serve(std::span<const pollfd> entries) {
  const auto now = Clock::now();
  std::vector<Candidate> candidates;
  auto entry = entries.begin() + 1;
  for (auto visitor = visitors_.begin(); visitor != visitors_.end();) {
    const bool ready = (entry++)->revents != 0;
    bool done = now >= visitor->limit;
    try {
      if (ready) attend(*visitor, candidates);
      if (visitor->frames.socket()) visitor->frames.flush(kReadBytes);
      done = done || !visitor->frames.socket() || visitor->frames.ended() ||
             (visitor->leaving && !visitor->frames.wants_to_send());
    } catch (const Error& error) {
      warn(fmt::format("let {} go: {}", visitor->frames.socket().peer(), error.message()));
      done = true;
    }
    if (done) visitor->frames.socket().close_gently();
    visitor = done ? visitors_.erase(visitor) : std::next(visitor);
  }
  accepting_ = true;
  if (entries.front().revents != 0) accept_visitors(now);
  return candidates;
}

void Lobby::accept_visitors(Clock::time_point now) {
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
    if (visitors_.size() >= kMostVisitors) visitors_.pop_front();
    visitors_.push_back({.frames = FrameSocket(std::move(*socket), kVisitorWindow, kNoGradients),
                         .limit = now + std::min(options_.timeout, kLongestHandshake),
                         .handshake = {}});
  }
}

void Lobby::drop_oldest(Clock::time_point now) {
  const auto oldest =
      std::ranges::find_if(visitors_, [&](const Visitor& visitor) { return visitor.limit > now; });
  if (oldest != visitors_.end()) oldest->limit = now;
}

void Lobby::warn(std::string_view text) {
  if (warnings_left_-- > 0) log(LogLevel::kWarning, "coordinator: {}", text);
}

void Lobby::attend(Visitor& visitor, std::vector<Candidate>& candidates) {
  visitor.frames.fill(kReadBytes);
  if (visitor.leaving) return visitor.frames.consume(visitor.frames.raw().size());
  if (!visitor.admitted) {
    recognise(visitor);
    while (visitor.opening == Opening::kHandshake && !visitor.admitted && shake_hands(visitor)) {
    }
  }
  if (!visitor.admitted || visitor.leaving) return;
  const auto start = visitor.frames.start();
  if (!start) return;
  if (start->tag != WireTag::kJoinRequest) {
    throw Error(ErrorCode::kUnexpectedMessage,
                fmt::format("it sent a {} before it joined", to_string(start->tag)));
  }
  if (auto message = visitor.frames.take_small()) {
    candidates.push_back({std::move(visitor.frames), std::get<JoinRequest>(std::move(*message)),
                          visitor.opening == Opening::kHandshake, visitor.place});
  }
}

void Lobby::recognise(Visitor& visitor) {
  if (visitor.opening != Opening::kUndecided) return;
  visitor.opening = recognise_opening(visitor.frames.raw());
  if (visitor.opening == Opening::kStranger) {
    throw Error(ErrorCode::kUnexpectedMessage, "it does not speak our protocol");
  }
  if (visitor.opening != Opening::kJoinRequest) return;
  if (!options_.identity.token.empty() && !options_.insecure) {
    throw Error(ErrorCode::kAuthentication,
                "it proves no token (the original protocol has none; --insecure lets it in)");
  }
  visitor.admitted = true;
}

// Whether there was a message to act on.
bool Lobby::shake_hands(Visitor& visitor) {
  const auto bytes = visitor.frames.raw();
  if (bytes.size() < kMessageHeaderBytes || visitor.leaving) return false;
  Handshake::Step step;
  try {
    const MessageHeader header = parse_header(bytes.first<kMessageHeaderBytes>(), kMaxHandshakeBody,
                                              visitor.frames.socket().peer());
    if (bytes.size() - kMessageHeaderBytes < header.length) return false;
    const auto body = bytes.subspan(kMessageHeaderBytes, header.length);
    const Message message{header.kind, {body.begin(), body.end()}};
    visitor.frames.consume(kMessageHeaderBytes + header.length);
    if (!visitor.handshake) visitor.handshake.emplace(make_handshake(message));
    step = visitor.handshake->receive(message);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kVersionMismatch) throw;
    // It cannot read our messages, but its decoder finds our version in this one's header.
    step = {frame(MessageKind::kRefusal, encode_wire_error(error)), error};
  }
  if (!step.reply.empty()) visitor.frames.queue(std::move(step.reply));
  if (step.failure) {
    warn(
        fmt::format("turned {} away: {}", visitor.frames.socket().peer(), step.failure->message()));
    visitor.leaving = true;
  }
  visitor.admitted = visitor.handshake && visitor.handshake->done();
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
                   candidate.frames.socket().peer(), reason.message()));
  if (!candidate.ours) return candidate.frames.socket().close_gently();
  candidate.frames.queue(
      encode(Refusal{{reason.code(), reason.rank(), std::string(reason.message())}}));
  visitors_.push_back({.frames = std::move(candidate.frames),
                       .limit = Clock::now() + std::min(options_.timeout, kLongestHandshake),
                       .handshake = {},
                       .leaving = true});
}

}  // namespace lockstep
