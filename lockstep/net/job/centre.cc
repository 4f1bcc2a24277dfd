#include "lockstep/net/job/centre.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "lockstep/base/index.h"
#include "lockstep/wire/control_messages.h"
#include "lockstep/wire/wire_error.h"

namespace lockstep {
namespace {

// A member asks to join at once, however long the job's timeout is.
constexpr std::chrono::seconds kLongestSilence{10};

Centre::Time later(Centre::Time now, Centre::Clock::duration by) {
  return by > Centre::Time::max() - now ? Centre::Time::max() : now + by;
}

}  // namespace

Centre::Centre(CentreOptions options, Time now)
    : options_(std::move(options)),
      gathering_(options_.world_size, options_.version,
                 later(now, options_.patience.count() > 0 ? options_.patience : options_.timeout)) {
}

void Centre::opened(LinkId link, const std::optional<PeerIdentity>& peer, Time now) {
  const Time limit = now + std::min<Clock::duration>(options_.timeout, kLongestSilence);
  peers_[link] = {peer, {}, -1, limit};
  silent_.emplace(limit, link);
}

void Centre::received(LinkId link, const Message& message, Time now) {
  const auto peer = peers_.find(link);
  if (peer == peers_.end()) return;  // it has been dismissed
  if (!peer->second.card) {
    join(peer, message, now);
  } else if (health_) {  // nothing is expected before the roster is out
    hear(peer->second.rank, message, now);
  }
}

void Centre::closed(LinkId link, Time now) {
  const auto peer = peers_.find(link);
  if (peer == peers_.end()) return;
  if (peer->second.card) {
    if (health_) {
      health_->closed(peer->second.rank, now);
    } else {
      gathering_.forget(*peer->second.card);
    }
  }
  forget(peer);
}

void Centre::forget(Peers::iterator peer) {
  silent_.erase({peer->second.limit, peer->first});
  peers_.erase(peer);
}

void Centre::dismiss(LinkId link, const Error& error) {
  sendings_.push_back({link, shared_frame(MessageKind::kVerdict, encode_wire_error(error)), true});
  forget(peers_.find(link));
}

void Centre::join(Peers::iterator peer, const Message& message, Time now) {
  const auto [link, proved] = std::pair(peer->first, peer->second.proved);
  const auto join = message.kind == MessageKind::kJoin ? decode_join(message.body) : std::nullopt;
  if (!join) return dismiss(link, Error(ErrorCode::kUnexpectedMessage, "malformed join"));
  const Card& card = join->card;
  if (proved && *proved != PeerIdentity{card.id, card.rank, proved->group}) {
    return dismiss(link, Error(ErrorCode::kAuthentication,
                               "the card names another process than the handshake", card.rank));
  }
  if (verdict_) return dismiss(link, *verdict_);
  if (roster_) {
    const bool known = card.rank >= 0 && card.rank < options_.world_size;
    return dismiss(
        link, Error(ErrorCode::kInvalidRank,
                    fmt::format("the job runs already with all its {} ranks{}", options_.world_size,
                                known ? "; " + name_of(roster_->roster[index_of(card.rank)]) +
                                            " has the place"
                                      : ""),
                    card.rank));
  }
  // Answer a little before the first member gives up, so that it still hears who is missing.
  const auto margin = std::min(join->patience / 10, std::chrono::milliseconds(500));
  if (const auto error = gathering_.add(card, now + join->patience - margin)) {
    dismiss(link, *error);
    return end_job(*error);
  }
  silent_.erase({peer->second.limit, link});
  peer->second.card = card;
  if (gathering_.complete()) start_job(now);
}

void Centre::hear(int rank, const Message& message, Time now) {
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

void Centre::report(const Error& seen, Time now) {
  if (!health_) return end_job(seen);
  health_->centre_report(name_of(options_.card), seen, now);
  decide(now);
}

void Centre::start_job(Time now) {
  Roster roster = gathering_.roster();
  if (const auto error = check_reachable(roster)) return end_job(*error);
  std::map<MemberId, int> ranks;
  std::vector<std::string> names;
  for (const Card& card : roster) {
    ranks[card.id] = card.rank;
    names.push_back(name_of(card));
  }
  for (auto& [link, peer] : peers_) {
    if (peer.card) peer.rank = ranks[peer.card->id];
  }
  health_.emplace(std::move(names), options_.timeout, now);
  next_heartbeat_ = now;
  const auto timeout = std::chrono::ceil<std::chrono::milliseconds>(options_.timeout);
  roster_ = RosterMessage{options_.card, timeout, std::move(roster)};
  send_to_all(MessageKind::kRoster, encode(*roster_));
}

void Centre::end_job(const Error& verdict) {
  if (verdict_) return;
  verdict_ = verdict;
  next_heartbeat_ = Time::max();
  send_to_all(MessageKind::kVerdict, encode_wire_error(verdict));
}

void Centre::send_to_all(MessageKind kind, std::span<const std::byte> body) {
  const SharedBytes bytes = shared_frame(kind, body);
  for (const auto& [link, peer] : peers_) {
    if (peer.card) sendings_.push_back({link, bytes});
  }
}

void Centre::tick(Time now) {
  while (!silent_.empty() && now >= silent_.begin()->first) {
    const LinkId link = silent_.begin()->second;
    sendings_.push_back({link, nullptr, true});
    forget(peers_.find(link));
  }
  if (health_) health_->tick(now);
  decide(now);
}

void Centre::decide(Time now) {
  if (verdict_) return;
  if (!health_) {
    if (now >= gathering_.deadline()) end_job(gathering_.missing());
    return;
  }
  if (health_->take_ping()) send_to_all(MessageKind::kPing, {});
  if (health_->verdict()) return end_job(*health_->verdict());
  if (now >= next_heartbeat_) {
    send_to_all(MessageKind::kHeartbeat, encode(std::vector<Progress>{}));
    next_heartbeat_ = now + options_.timeout / 5;
  }
}

void Centre::leave(const std::vector<Progress>& progress, Time now) {
  if (health_ && !verdict_) {
    if (options_.card.rank >= 0) health_->goodbye(options_.card.rank, progress, now);
    health_->settle();
    if (health_->verdict()) end_job(*health_->verdict());
  }
  send_to_all(MessageKind::kGoodbye, encode(progress));
}

Centre::Time Centre::wake_at() const {
  Time wake = next_heartbeat_;
  if (health_) {
    wake = std::min(wake, health_->wake_at());
  } else if (!verdict_) {
    wake = std::min(wake, gathering_.deadline());
  }
  if (!silent_.empty()) wake = std::min(wake, silent_.begin()->first);
  return wake;
}

}  // namespace lockstep
