#include "lockstep/net/job/door.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/log.h"
#include "lockstep/net/socket/interface.h"
#include "lockstep/net/socket/peer_user.h"
#include "lockstep/wire/bytes.h"
#include "lockstep/wire/gradient_messages.h"
#include "lockstep/wire/wire_error.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

// So many visitors may be here at once, and so many of one address; then its oldest has to go.
constexpr std::size_t kMostVisitors = 1024;
constexpr std::size_t kMostOfOneAddress = 512;
// A member says its words at once, however long the job's timeout is.
constexpr Deadline::Clock::duration kLongestHandshake = 5s;
constexpr Deadline::Clock::duration kAcceptPause = 100ms;
constexpr int kAcceptsAtOnce = 64;  // then those who were let in are heard
constexpr std::size_t kLargestJoinRequest = 4 + kMaxSmallFrame;

// Who shares a limit: a host, or whoever has the network of an IPv6 address.
std::string address_group(const SocketAddress& address) {
  if (address.family() == AF_INET) return address.host();
  if (address.family() != AF_INET6) return "this host";
  const auto& v6 = reinterpret_cast<const sockaddr_in6*>(address.data())->sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&v6)) return address.host();
  return std::string(reinterpret_cast<const char*>(v6.s6_addr), 8);
}

// A gradient server's visitors are few, and one of them may be looked for: all that go are told of.
bool serves_workers(const Entrance& entrance) {
  return std::ranges::find(entrance.purposes, Purpose::kServer) != entrance.purposes.end();
}

// Whether all of a JoinRequest of the original protocol is there.
bool has_whole_frame(std::span<const std::byte> bytes) {
  if (bytes.size() < kFrameStartBytes) return false;
  const auto start = decode_frame_start(bytes.first<kFrameStartBytes>());
  return start && bytes.size() >= 4 + std::size_t{start->length};
}

}  // namespace

Door::Door(Identity identity, std::vector<Entrance> entrances, Clock::duration timeout)
    : identity_(std::move(identity)),
      entrances_(std::move(entrances)),
      timeout_(timeout),
      next_key_(entrances_.size()) {
  resume();
}

Door::Time Door::wake_at() const {
  Time wake = paused_until_.value_or(Time::max());
  // All have the same patience: the oldest loses it first.
  if (!visitors_.empty()) wake = std::min(wake, visitors_.begin()->second.limit);
  return wake;
}

std::vector<Arrival> Door::serve(Time now) {
  std::vector<Arrival> arrivals;
  if (paused_until_ && now >= *paused_until_) resume();
  for (const std::uint64_t key : poller_.wait(Deadline::at({}))) {  // never waits
    if (key < entrances_.size()) {
      accept_visitors(key, now);
    } else if (const auto visitor = visitors_.find(key); visitor != visitors_.end()) {
      attend(visitor, arrivals);
    }
  }
  while (!visitors_.empty() && now >= visitors_.begin()->second.limit) {
    const Visitor& late = visitors_.begin()->second;
    if (serves_workers(entrances_[late.entrance])) {
      warn(fmt::format("let {} go: it did not say who it is in time", late.link.socket().peer()));
    }
    forget(visitors_.begin());
  }
  return arrivals;
}

void Door::set_place(std::uint32_t generation, int rank) {
  identity_.generation = generation;
  identity_.rank = rank;
}

void Door::pause(Time now) {
  for (const Entrance& entrance : entrances_) poller_.remove(entrance.listener.fd());
  paused_until_ = now + kAcceptPause;
}

void Door::resume() {
  for (std::size_t i = 0; i < entrances_.size(); ++i) poller_.add(entrances_[i].listener.fd(), i);
  paused_until_.reset();
}

void Door::accept_visitors(std::size_t entrance, Time now) {
  try {
    for (int i = 0; i < kAcceptsAtOnce && !paused_until_; ++i) {
      std::optional<Socket> socket = try_accept(entrances_[entrance].listener);
      if (!socket) return;
      admit(std::move(*socket), entrance, now);
    }
  } catch (const Error& error) {
    // Most likely no descriptors are left. Make room, then breathe before the next attempt.
    warn(error.message());
    if (!visitors_.empty()) forget(visitors_.begin());
    pause(now);
  }
}

void Door::admit(Socket socket, std::size_t entrance, Time now) {
  SocketAddress address;
  try {
    address = socket.peer_address();
    if (address.family() == AF_UNIX) {
      require_trusted_peer(socket);
    } else {
      // Without a token strangers stay out by their address, and later by their user.
      if (identity_.token.empty() && !address.is_loopback()) return;
      tune_tcp(socket, timeout_);
    }
  } catch (const Error&) {  // it is gone already, or another user's
    return;
  }
  std::string group = address_group(address);
  make_room(group);
  const std::uint64_t key = next_key_++;
  poller_.add(socket.fd(), key);
  by_address_[group].insert(key);
  visitors_.emplace(key,
                    Visitor{Link(std::move(socket), kMaxHandshakeBody), entrance, std::move(group),
                            now + std::min<Clock::duration>(timeout_, kLongestHandshake)});
}

void Door::make_room(const std::string& address) {
  const auto of = by_address_.find(address);
  if (of != by_address_.end() && of->second.size() >= kMostOfOneAddress) {
    return forget(visitors_.find(*of->second.begin()));
  }
  if (visitors_.size() < kMostVisitors) return;
  const auto most = std::ranges::max_element(by_address_, {},
                                             [](const auto& entry) { return entry.second.size(); });
  forget(visitors_.find(*most->second.begin()));
}

void Door::forget(Visitors::iterator visitor) {
  const auto of = by_address_.find(visitor->second.address);
  of->second.erase(visitor->first);
  if (of->second.empty()) by_address_.erase(of);
  visitor->second.link.socket().close_gently();
  visitors_.erase(visitor);
}

void Door::warn(std::string_view text) {
  if (warnings_left_-- > 0) log(LogLevel::kWarning, "door: {}", text);
}

void Door::attend(Visitors::iterator visitor, std::vector<Arrival>& arrivals) {
  Visitor& v = visitor->second;
  try {
    v.link.pump();
    if (!v.handshake && is_original(v)) {
      if (has_whole_frame(v.link.rest())) {
        require_own_user(v);
        arrivals.push_back(let_in(visitor, /*original=*/true));
        return;
      }
      if (v.link.ended()) throw Error(ErrorCode::kChannelClosed, "it went in the middle of a word");
      if (v.link.rest().size() > kLargestJoinRequest) {
        throw Error(ErrorCode::kMessageTooLarge, "its request to join is too long");
      }
      return;
    }
    while (!v.leaving && !(v.handshake && v.handshake->done())) {
      const auto message = v.link.next();
      if (!message) break;
      shake_hands(v, *message);
    }
    v.link.flush();
    // Records follow the last word of the handshake: it has to be out.
    if (v.handshake && v.handshake->done() && !v.link.wants_to_send()) {
      // A client with records waits for that word before it sends the first.
      if (v.handshake->protection() != Protection::kNone && !v.link.rest().empty()) {
        throw Error(ErrorCode::kUnexpectedMessage, "it sent bytes before the handshake was done");
      }
      arrivals.push_back(let_in(visitor, /*original=*/false));
      return;
    }
  } catch (const Error& error) {
    warn(fmt::format("let {} go: {}", v.link.socket().peer(), error.message()));
    return forget(visitor);
  }
  if (const auto& failure = v.link.failure()) {
    if (failure->code() == ErrorCode::kVersionMismatch) {
      // It cannot read our messages, but its decoder finds our version in this one's header.
      v.link.socket().send_if_heard(frame(MessageKind::kRefusal, encode_wire_error(*failure)));
    }
    // Whoever watches a port comes and goes.
    const bool silent = failure->code() == ErrorCode::kChannelClosed && !v.handshake;
    if (!silent || serves_workers(entrances_[v.entrance])) {
      warn(fmt::format("let {} go: {}", v.link.socket().peer(), failure->message()));
    }
    return forget(visitor);
  }
  if (v.leaving && (!v.link.wants_to_send() || v.link.ended())) return forget(visitor);
  if (v.sending != v.link.wants_to_send()) {
    v.sending = !v.sending;
    poller_.set_sending(v.link.socket().fd(), visitor->first, v.sending);
  }
}

bool Door::is_original(const Visitor& visitor) const {
  const Entrance& entrance = entrances_[visitor.entrance];
  if (!serves_workers(entrance)) return false;
  switch (recognise_opening(visitor.link.rest())) {
    case Opening::kUndecided:
    case Opening::kHandshake: return false;
    case Opening::kStranger:
      throw Error(ErrorCode::kUnexpectedMessage, "it does not speak our protocol");
    case Opening::kJoinRequest: break;
  }
  if (!entrance.original) {
    throw Error(ErrorCode::kUnexpectedMessage,
                "it speaks the original protocol; ranks of 'lockstep train' are served here (mode "
                "lanes)");
  }
  if (!identity_.token.empty() && !entrance.insecure) {
    throw Error(ErrorCode::kAuthentication,
                "it proves no token (the original protocol has none; --insecure lets it in)");
  }
  return true;
}

void Door::require_own_user(const Visitor& visitor) const {
  const Socket& socket = visitor.link.socket();
  const bool tcp = socket.peer_address().family() != AF_UNIX;  // others were looked at
  if (tcp && identity_.token.size() < kLeastToken && !entrances_[visitor.entrance].insecure) {
    require_trusted_peer(socket);
  }
}

void Door::shake_hands(Visitor& visitor, const Message& message) {
  if (!visitor.handshake) {
    try {
      require_own_user(visitor);
    } catch (const Error& error) {
      visitor.link.socket().send_if_heard(frame(MessageKind::kRefusal, encode_wire_error(error)));
      throw;
    }
    visitor.handshake.emplace(make_handshake(visitor, message));
  }
  Handshake::Step step = visitor.handshake->receive(message);
  if (!step.reply.empty()) {
    visitor.link.queue(std::make_shared<const std::vector<std::byte>>(std::move(step.reply)));
  }
  if (step.failure) {
    warn(fmt::format("turned {} away: {}", visitor.link.socket().peer(), step.failure->message()));
    visitor.leaving = true;
  }
}

// What the visitor has come for is in its hello; the handshake refuses what is not offered here.
Handshake Door::make_handshake(const Visitor& visitor, const Message& first) const {
  const Entrance& entrance = entrances_[visitor.entrance];
  Identity identity = identity_;
  Purpose purpose = entrance.purposes.front();
  if (const auto hello =
          first.kind == MessageKind::kHello ? decode_hello(first.body) : std::nullopt) {
    if (std::ranges::find(entrance.purposes, hello->purpose) != entrance.purposes.end()) {
      purpose = hello->purpose;
    }
    if (entrance.insecure && !hello->has_token) identity.token.clear();
    // In another generation this process may have another rank, or none.
    if (hello->generation != identity.generation) identity.rank = -1;
  }
  return {Handshake::Role::kServer, identity, purpose, 0,
          protection_for(visitor.link.socket(), identity)};
}

Arrival Door::let_in(Visitors::iterator visitor, bool original) {
  Visitor& v = visitor->second;
  poller_.remove(v.link.socket().fd());
  Arrival arrival{std::move(v.link), Purpose::kServer, {}, original};
  if (!original) {
    arrival.purpose = v.handshake->purpose();
    arrival.peer = v.handshake->peer();
    v.handshake->protect(arrival.link.socket());
  }
  forget(visitor);
  return arrival;
}

}  // namespace lockstep
