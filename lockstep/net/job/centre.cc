#include "lockstep/net/job/centre.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/host.h"
#include "lockstep/base/index.h"
#include "lockstep/base/log.h"
#include "lockstep/net/job/roster.h"
#include "lockstep/wire/control_messages.h"
#include "lockstep/wire/wire_error.h"

namespace lockstep {
namespace {

// Strangers may hold this many connections open; then the oldest has to go.
constexpr std::size_t kMaxVisitors = 1024;
// A rank's first messages arrive within this, however long the job's timeout is.
constexpr std::chrono::seconds kLongestHandshake{10};
constexpr std::chrono::milliseconds kAcceptPause{100};

bool is_from_loopback(const Socket& socket) {
  try {
    return socket.peer_address().is_loopback();
  } catch (const Error&) {  // it is gone already
    return false;
  }
}

Link::Bytes shared_frame(MessageKind kind, std::span<const std::byte> body) {
  return std::make_shared<const std::vector<std::byte>>(frame(kind, body));
}

}  // namespace

Centre::Centre(Socket listener, CentreOptions options)
    : options_(std::move(options)),
      card_{options_.identity.rank, this_host().hostname, static_cast<std::int32_t>(::getpid())},
      listener_(std::move(listener)),
      ranks_(static_cast<std::size_t>(options_.world_size)),
      gathering_(options_.world_size, options_.version, Deadline::after(options_.timeout).time()) {}

Centre::~Centre() {
  flush_all();
  for (auto& link : ranks_) {
    if (link) link->socket().close_gently();
  }
}

void Centre::leave(const std::vector<Progress>& progress) {
  if (health_ && !verdict_) {
    if (card_.rank >= 0) health_->goodbye(card_.rank, progress, Clock::now());
    health_->settle();
    if (health_->verdict()) end_job(*health_->verdict());
  }
  broadcast(MessageKind::kGoodbye, encode(progress));
}

void Centre::adopt(Socket socket) {
  Visitor visitor{Link(std::move(socket), kMaxJoinBody),
                  Handshake(Handshake::Role::kServer, options_.identity, Purpose::kRendezvous),
                  /*admitted=*/true, Clock::time_point::max()};
  visitors_.push_back(std::move(visitor));
}

void Centre::add_poll(std::vector<pollfd>& entries) const {
  const auto add = [&](const Link& link) {
    const short events = link.wants_to_send() ? POLLIN | POLLOUT : POLLIN;
    entries.push_back({link.socket().fd(), events, 0});
  };
  entries.push_back({accepting_ ? listener_.fd() : -1, POLLIN, 0});
  for (const auto& link : ranks_) {
    if (link) add(*link);
  }
  for (const Visitor& visitor : visitors_) add(visitor.link);
}

Centre::Clock::time_point Centre::wake_at() const {
  Clock::time_point wake = next_heartbeat_;
  if (health_) {
    wake = std::min(wake, health_->wake_at());
  } else if (!verdict_) {
    wake = std::min(wake, gathering_.deadline());
  }
  for (const Visitor& visitor : visitors_) wake = std::min(wake, visitor.limit);
  if (!accepting_) wake = std::min(wake, Clock::now() + kAcceptPause);
  return wake;
}

void Centre::serve(std::span<const pollfd> entries) {
  const auto now = Clock::now();
  // In the order of add_poll(): a link that a handler drops or moves has had its turn. All are
  // heard before silence is judged.
  auto entry = entries.begin() + 1;
  for (int rank = 0; rank < options_.world_size; ++rank) {
    if (ranks_[index_of(rank)] && (entry++)->revents != 0) serve_rank(rank, now);
  }
  for (Visitor& visitor : visitors_) {
    if ((entry++)->revents != 0) serve_visitor(visitor, now);
  }
  accepting_ = true;
  if (entries.front().revents != 0) accept_visitors(now);
  decide(now);
  flush_all();
  std::erase_if(visitors_, [&](Visitor& visitor) {
    const bool done = !visitor.link.socket() || visitor.link.failure() || now >= visitor.limit ||
                      (visitor.leaving && !visitor.link.wants_to_send());
    if (done) visitor.link.socket().close_gently();
    return done;
  });
}

void Centre::accept_visitors(Clock::time_point now) {
  constexpr int kAtOnce = 64;
  const auto patience = std::min<Clock::duration>(options_.timeout, kLongestHandshake);
  for (int i = 0; i < kAtOnce; ++i) {
    std::optional<Socket> socket;
    try {
      socket = try_accept(listener_);
    } catch (const Error& error) {
      // Most likely no descriptors are left. Make room, then breathe before the next attempt.
      warn(error.message());
      drop_oldest_stranger(now);
      accepting_ = false;
      return;
    }
    if (!socket) return;
    // Without a token the handshake proves nothing, so strangers stay out by their address.
    if (options_.identity.token.empty() && !is_from_loopback(*socket)) continue;
    if (visitors_.size() >= kMaxVisitors) drop_oldest_stranger(now);
    visitors_.push_back(
        {Link(std::move(*socket), kMaxHandshakeBody),
         Handshake(Handshake::Role::kServer, options_.identity, Purpose::kRendezvous),
         /*admitted=*/false, now + patience});
  }
}

void Centre::drop_oldest_stranger(Clock::time_point now) {
  const auto oldest = std::ranges::find_if(
      visitors_, [&](const Visitor& visitor) { return !visitor.admitted && visitor.limit > now; });
  if (oldest != visitors_.end()) oldest->limit = now;
}

void Centre::warn(std::string_view text) {
  if (warnings_left_-- > 0) log(LogLevel::kWarning, "rendezvous: {}", text);
}

void Centre::serve_visitor(Visitor& visitor, Clock::time_point now) {
  visitor.link.pump();
  while (!visitor.leaving && visitor.link.socket()) {
    const auto message = visitor.link.next();
    if (!message) break;
    if (!visitor.admitted) {
      shake_hands(visitor, *message);
    } else {
      join(visitor, *message, now);
    }
  }
  const auto& failure = visitor.link.failure();
  if (failure && failure->code() == ErrorCode::kVersionMismatch) {
    // It cannot read our messages, but its decoder finds our version in this one's header.
    visitor.link.socket().send_if_heard(frame(MessageKind::kRefusal, encode_wire_error(*failure)));
  }
}

void Centre::shake_hands(Visitor& visitor, const Message& message) {
  Handshake::Step step = visitor.handshake.receive(message);
  if (!step.reply.empty()) {
    visitor.link.queue(std::make_shared<const std::vector<std::byte>>(std::move(step.reply)));
  }
  if (step.failure) {
    warn(fmt::format("turned {} away: {}", visitor.link.socket().peer(), step.failure->message()));
    visitor.leaving = true;
  }
  visitor.admitted = visitor.handshake.done();
  if (visitor.admitted) visitor.link.set_limit(kMaxJoinBody);
}

void Centre::dismiss(Visitor& visitor, const Error& error) {
  visitor.link.queue(MessageKind::kVerdict, encode_wire_error(error));
  visitor.leaving = true;
}

void Centre::join(Visitor& visitor, const Message& message, Clock::time_point now) {
  const auto join = message.kind == MessageKind::kJoin ? decode_join(message.body) : std::nullopt;
  if (!join) return dismiss(visitor, Error(ErrorCode::kUnexpectedMessage, "malformed join"));
  const Card& card = join->card;
  if (visitor.handshake.done() &&
      visitor.handshake.peer() !=
          PeerIdentity{card.id, card.rank, visitor.handshake.peer().group}) {
    return dismiss(visitor, Error(ErrorCode::kAuthentication,
                                  "the card names another process than the handshake", card.rank));
  }
  if (verdict_) return dismiss(visitor, *verdict_);
  if (health_) {
    const bool known = card.rank >= 0 && card.rank < options_.world_size;
    return dismiss(
        visitor,
        Error(ErrorCode::kInvalidRank,
              fmt::format(
                  "the job runs already with all its {} ranks{}", options_.world_size,
                  known ? "; " + name_of(roster_[index_of(card.rank)]) + " has the place" : ""),
              card.rank));
  }
  // Answer a little before the first rank gives up, so that it still hears who is missing.
  const auto margin = std::min(join->patience / 10, std::chrono::milliseconds(500));
  if (const auto error = gathering_.add(card, now + join->patience - margin)) {
    dismiss(visitor, *error);
    end_job(*error);
    return;
  }
  visitor.link.socket().set_peer(name_of(card), card.rank);
  visitor.link.set_limit(kMaxControlBody);
  ranks_[index_of(card.rank)] = std::make_unique<Link>(std::move(visitor.link));
}

void Centre::serve_rank(int rank, Clock::time_point now) {
  Link& link = *ranks_[index_of(rank)];
  link.pump();
  while (const auto message = link.next()) receive(rank, *message, now);
  if (!link.failure()) return;
  if (health_) {
    health_->closed(rank, now);
  } else {
    gathering_.forget(rank);
  }
  ranks_[index_of(rank)].reset();
}

void Centre::receive(int rank, const Message& message, Clock::time_point now) {
  if (!health_) return;  // nothing is expected before the roster is out
  if (message.kind == MessageKind::kReport) {
    if (const auto report = decode_report(message.body)) return health_->report(rank, *report, now);
  } else if (message.kind == MessageKind::kHeartbeat || message.kind == MessageKind::kGoodbye) {
    if (auto progress = decode_progress(message.body)) {
      return message.kind == MessageKind::kHeartbeat
                 ? health_->heartbeat(rank, std::move(*progress), now)
                 : health_->goodbye(rank, std::move(*progress), now);
    }
  }
  const Error error(ErrorCode::kUnexpectedMessage,
                    fmt::format("sent a malformed {}", to_string(message.kind)), rank);
  health_->report(rank, {error, {}}, now);
}

void Centre::start_job(Clock::time_point now) {
  roster_ = gathering_.roster();
  if (const auto error = check_reachable(roster_)) return end_job(*error);
  if (const std::string warning = fingerprint_warning(roster_); !warning.empty()) {
    log(LogLevel::kWarning, "{}", warning);
  }
  std::vector<std::string> names;
  for (const Card& card : roster_) names.push_back(name_of(card));
  health_.emplace(std::move(names), options_.timeout, now);
  next_heartbeat_ = now;
  broadcast(MessageKind::kRoster, encode(RosterMessage{card_, roster_}));
}

void Centre::end_job(const Error& verdict) {
  if (verdict_) return;
  verdict_ = verdict;
  broadcast(MessageKind::kVerdict, encode_wire_error(verdict));
}

void Centre::broadcast(MessageKind kind, std::span<const std::byte> body) {
  const Link::Bytes bytes = shared_frame(kind, body);
  for (auto& link : ranks_) {
    if (link) link->queue(bytes);
  }
}

void Centre::decide(Clock::time_point now) {
  if (verdict_) return;
  if (!health_) {
    if (gathering_.complete()) {
      start_job(now);
    } else if (now >= gathering_.deadline()) {
      end_job(gathering_.missing());
    }
    return;
  }
  health_->tick(now);
  if (health_->take_ping()) broadcast(MessageKind::kPing, {});
  if (health_->verdict()) {
    next_heartbeat_ = Clock::time_point::max();
    return end_job(*health_->verdict());
  }
  if (now >= next_heartbeat_) {
    broadcast(MessageKind::kHeartbeat, encode(std::vector<Progress>{}));
    next_heartbeat_ = now + options_.timeout / 5;
  }
}

void Centre::flush_all() {
  for (Visitor& visitor : visitors_) visitor.link.flush();
  for (auto& link : ranks_) {
    if (link) link->flush();
  }
}

}  // namespace lockstep
