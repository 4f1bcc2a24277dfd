#include "lockstep/net/job/centre.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <string>

#include "lockstep/base/text.h"
#include "lockstep/wire/wire_error.h"

namespace lockstep {
namespace {

// A member asks to join at once, however long the job's timeout is.
constexpr std::chrono::seconds kLongestSilence{10};
// In timeouts: a member that is alive may compute for so long before it joins again, and may take
// so long to connect to the others.
constexpr int kAnswerTimeouts = 10;
constexpr int kReadyTimeouts = 3;
// A newcomer does not know the job's timeout, and counts with the usual 30 s.
constexpr std::chrono::seconds kLongestBetweenHeartbeats{5};
// How often in a timeout silence is judged while the next generation is under way.
constexpr int kJudgements = 10;

Centre::Time later(Centre::Time now, Centre::Clock::duration by) {
  return by > Centre::Time::max() - now ? Centre::Time::max() : now + by;
}

// So much sooner than a member that waits gives up it is told who is missing.
Centre::Clock::duration margin_of(Centre::Clock::duration patience) {
  return std::min<Centre::Clock::duration>(patience / 10, std::chrono::milliseconds(500));
}

// The job can go on without the rank that the error names. Other errors all ranks have in common.
bool is_loss(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kPeerLost:
    case ErrorCode::kTimeout:
    case ErrorCode::kNoConnection:
    case ErrorCode::kChannelClosed: return error.rank() >= 0;
    default: return false;
  }
}

}  // namespace

Centre::Centre(CentreOptions options, Time now)
    : options_(std::move(options)),
      gathering_(options_.world_size, options_.version,
                 later(now, options_.patience.count() > 0 ? options_.patience : options_.timeout)),
      last_event_(now),
      last_word_(now) {}

Centre::Centre(CentreOptions options, Inheritance inherited, Time now)
    : Centre(std::move(options), now) {
  generation_ = inherited.roster.generation;
  survives_ = inherited.roster.survives;
  step_ = inherited.roster.step;
  description_ = std::move(inherited.description);
  std::vector<Place> places;
  for (const Card& card : inherited.roster.roster) places.push_back({.card = card});
  set_places(std::move(places));
  roster_ = std::move(inherited.roster);
  start_regrouping(now);
  for (const int rank : inherited.lost) {
    take_away(rank, Departure::Kind::kDied,
              inherited.why.empty() ? "it does not answer" : inherited.why);
  }
}

void Centre::opened(LinkId link, const std::optional<PeerIdentity>& peer, Time now) {
  notice_pause(now);
  if (resigned_) return sendings_.push_back({link, nullptr, true});
  const Time limit = now + std::min<Clock::duration>(options_.timeout, kLongestSilence);
  peers_[link] = {.proved = peer, .join = {}, .limit = limit, .heard = now};
  silent_.emplace(limit, link);
}

void Centre::received(LinkId link, const Message& message, Time now) {
  notice_pause(now);
  const auto peer = peers_.find(link);
  if (peer == peers_.end()) return;  // it has been dismissed
  peer->second.heard = now;
  if (woke_ && now > *woke_ && !peer->second.back) peer->second.back = now;
  if (!peer->second.join || message.kind == MessageKind::kJoin) return join(peer, message, now);
  if (message.kind == MessageKind::kDescription) {
    if (auto description = decode_description(message.body)) {
      description_ = std::move(description);
      for (auto each = peers_.begin(); each != peers_.end(); ++each) {
        if (each->second.join && each->second.rank < 0) welcome(each);
      }
      return;
    }
  }
  const int rank = peer->second.rank;
  if (rank < 0) return;  // a newcomer's heartbeats; before the roster nothing else is expected
  if (message.kind == MessageKind::kLine) {
    const auto* text = reinterpret_cast<const char*>(message.body.data());
    if (rank == 0) lines_.emplace_back(text, message.body.size());
    return;
  }
  if (in_generation()) {
    hear(rank, message, now);
  } else {
    hear_between(rank, message, now);
  }
}

void Centre::closed(LinkId link, Time now) {
  notice_pause(now);
  const auto peer = peers_.find(link);
  if (peer == peers_.end()) return;
  const int rank = peer->second.rank;
  if (rank >= 0 && woke_) {
    place(rank).link.reset();
    forget(peer);
    return miss(rank, now);
  }
  if (rank >= 0 && in_generation()) {
    health_->closed(rank, now);
    place(rank).link.reset();
    if (survives_ && !verdict_ && place(rank).lost_us) {  // it seeks another centre; this one lives
      forget(peer);
      return lose(Error(ErrorCode::kPeerLost,
                        fmt::format("{} lost its connection to {}", name_of(place(rank).card),
                                    name_of(roster_->centre)),
                        rank),
                  now);
    }
  } else if (rank >= 0 && !place(rank).gone) {
    place(rank).link.reset();
    forget(peer);
    lose(Error(ErrorCode::kPeerLost,
               fmt::format("{} died: its connection closed", name_of(place(rank).card)), rank),
         now);
    return;
  } else if (phase_ == Phase::kGathering && peer->second.join) {
    gathering_.forget(peer->second.join->card);
  }
  forget(peer);
}

void Centre::forget(Peers::iterator peer) {
  silent_.erase({peer->second.limit, peer->first});
  unprepare(peer->first);
  peers_.erase(peer);
}

void Centre::hang_up(Peers::iterator peer) {
  sendings_.push_back({peer->first, nullptr, true});
  forget(peer);
}

void Centre::dismiss(LinkId link, const Error& error) {
  send(link, MessageKind::kVerdict, encode_wire_error(error), true);
  const auto peer = peers_.find(link);
  if (peer->second.rank >= 0) place(peer->second.rank).link.reset();
  forget(peer);
}

void Centre::join(Peers::iterator peer, const Message& message, Time now) {
  const auto [link, proved] = std::pair(peer->first, peer->second.proved);
  const auto join = message.kind == MessageKind::kJoin ? decode_join(message.body) : std::nullopt;
  if (!join) {
    const int rank = peer->second.rank;
    if (rank >= 0 && in_generation()) return hear(rank, message, now);
    return dismiss(link, Error(ErrorCode::kUnexpectedMessage, "malformed join"));
  }
  const Card& card = join->card;
  const bool first = !peer->second.join;
  const bool returns = join->last.number > 0;  // then its handshake says no rank
  if (proved && (proved->id != card.id || (!returns && first && proved->rank != card.rank))) {
    return dismiss(link, Error(ErrorCode::kAuthentication,
                               "the card names another process than the handshake", card.rank));
  }
  if (verdict_) {
    if (!roster_) {
      refusals_.push_back(fmt::format("turned {} away: {}", name_of(card), verdict_->message()));
    }
    return dismiss(link, *verdict_);
  }
  silent_.erase({peer->second.limit, link});
  peer->second.join = *join;
  step_ = std::max(step_, join->step);
  patience_ = std::max<Clock::duration>(patience_, join->patience);
  // A new process at the address of a centre that is gone, whose members have waited for it.
  const bool knows_none = phase_ == Phase::kGathering || !roster_;
  if (knows_none && returns && join->last.number > generation_.number) expect_again(*join, now);
  if (phase_ == Phase::kGathering) {
    peer->second.invited = options_.invitation && card.rank < 0 && join->standing == Standing::kNew;
    if (!peer->second.invited) return gather(peer, *join, now);
    next_heartbeat_ = std::min(next_heartbeat_, now);
    return send(link, MessageKind::kWelcome, encode(Description{0, *options_.invitation}));
  }

  if (const auto rank = place_of(*join)) {
    if (place(*rank).link > link) return hang_up(peer);  // a link that it has given up
    take_link(*rank, link);
    if (in_generation()) {
      if (join->standing == Standing::kBroken || join->standing == Standing::kEnters) {
        end_generation(
            Error(ErrorCode::kPeerLost, fmt::format("{} cannot go on", name_of(place(*rank).card))),
            now);
      } else {
        start_regrouping(now);
      }
    }
    answer(*rank, *join);
    return form_if_complete(now);
  }
  if (peer->second.rank >= 0) return;  // it asked before it knew of the newest generation
  if (!survives_) {
    const bool known = card.rank >= 0 && card.rank < static_cast<int>(places_.size());
    return dismiss(
        link,
        Error(ErrorCode::kInvalidRank,
              fmt::format("the job runs already with all its {} ranks{}", places_.size(),
                          known ? "; " + name_of(place(card.rank).card) + " has the place" : ""),
              card.rank));
  }
  if (const auto error = refusal(card)) return dismiss(link, *error);
  if (peer->second.invited && join->standing == Standing::kPrepared) {
    return dismiss(link,
                   Error(ErrorCode::kNoConnection, "the job has begun meanwhile: join again"));
  }
  if (join->standing == Standing::kNew) return welcome(peer);
  const auto old = place_with(card.id);
  if ((old && place(*old).link > link) || !close_older_links(link, card.id)) return hang_up(peer);
  prepare(link);
  if (old && returns) {
    // It has left the link of its place, and does not know of the newest generation.
    return lose(
        Error(ErrorCode::kPeerLost, name_of(place(*old).card) + " lost its connection", *old), now);
  }
  form_if_complete(now);
}

void Centre::gather(Peers::iterator peer, const Join& join, Time now) {
  const Time limit = later(now, join.patience - margin_of(join.patience));
  if (const auto error = gathering_.add(join.card, limit)) {
    dismiss(peer->first, *error);
    return end_job(*error);
  }
  if (gathering_.complete()) start_job(now);
}

// Why a newcomer cannot be let in. What the bits of the result depend on must be the same.
std::optional<Error> Centre::refusal(const Card& card) const {
  if (card.version != options_.version) {
    return Error(ErrorCode::kVersionMismatch,
                 fmt::format("{} runs lockstep {}, the job {}", name_of(card), card.version,
                             options_.version));
  }
  const auto there =
      std::ranges::find_if(places_, [](const Place& at) { return !at.gone && at.link; });
  if (there != places_.end() && there->card.fingerprint != card.fingerprint) {
    return Error(ErrorCode::kInvalidArgument,
                 fmt::format("{} has another kind of processor or C library ({}) than the job "
                             "({}): its sums would have other bits",
                             name_of(card), card.fingerprint, there->card.fingerprint));
  }
  return reach_refusal(card);
}

// While a generation is under way; of those that regroup nobody knows who will be left.
std::optional<Error> Centre::reach_refusal(const Card& card) const {
  const auto conflict = in_generation() ? reach_.conflict(card) : std::nullopt;
  if (!conflict) return std::nullopt;
  return Error(conflict->code(), std::string(conflict->message()));  // no rank has failed
}

// Newcomers that do not go together with those who were let in before them.
void Centre::dismiss_out_of_reach() {
  for (auto next = prepared_.begin(); next != prepared_.end();) {
    const LinkId link = (next++)->first;
    if (const auto error = reach_refusal(peers_.at(link).join->card)) dismiss(link, *error);
  }
}

// The rank that the member has in the newest generation, if it is still expected there.
std::optional<int> Centre::place_of(const Join& join) const {
  const int rank = join.card.rank;
  if (join.last != generation_ || rank < 0 || rank >= static_cast<int>(places_.size())) return {};
  const Place& at = places_[index_of(rank)];
  const bool same = at.card.id == join.card.id || (at.card.id == MemberId{} && !at.link);
  return same && !at.gone ? std::optional(rank) : std::nullopt;
}

std::optional<int> Centre::place_with(const MemberId& id) const {
  const auto found = ranks_.find(id);
  if (found == ranks_.end() || places_[index_of(found->second)].gone) return std::nullopt;
  return found->second;
}

void Centre::set_places(std::vector<Place> places) {
  places_ = std::move(places);
  ranks_.clear();
  for (std::size_t i = 0; i < places_.size(); ++i) {
    // Members of a generation that only they know are named when they come.
    if (places_[i].card.id != MemberId{}) ranks_[places_[i].card.id] = static_cast<int>(i);
  }
}

// Once the cards of places_ have their ranks.
void Centre::set_reach() {
  reach_ = Reach();
  for (const Place& at : places_) reach_.add(at.card);
}

void Centre::prepare(LinkId link) {
  const MemberId& id = peers_.at(link).join->card.id;
  unprepare(link);
  prepared_[link] = id;
  links_of_prepared_.emplace(id, link);
}

void Centre::unprepare(LinkId link) {
  if (const auto known = prepared_.extract(link)) links_of_prepared_.erase({known.mapped(), link});
}

// A process that seeks the centre may have called it before, and the end of that link may come
// later than what it says over the new one. Returns whether `link` is the newest of those that
// wait.
bool Centre::close_older_links(LinkId link, const MemberId& id) {
  for (auto next = links_of_prepared_.lower_bound({id, 0});
       next != links_of_prepared_.end() && next->first == id;) {
    const LinkId other = (next++)->second;
    if (other == link) continue;
    if (other > link) return false;
    hang_up(peers_.find(other));
  }
  return true;
}

// A member comes to its place, perhaps over another link than before.
void Centre::take_link(int rank, LinkId link) {
  Place& at = place(rank);
  if (at.link && *at.link != link) hang_up(peers_.find(*at.link));
  at.link = link;
  // A link has one place: one that claims a second place gives up its first.
  const int before = std::exchange(peers_.at(link).rank, rank);
  if (before >= 0 && before != rank) place(before).link.reset();
  unprepare(link);
}

void Centre::answer(int rank, const Join& join) {
  Place& at = place(rank);
  at.card = join.card;
  ranks_[at.card.id] = rank;
  if (!std::exchange(at.answered, true)) --awaited_;
  at.failed = at.lost_us = false;
  at.waits = join.standing == Standing::kWaits;
  at.enters = join.standing == Standing::kEnters;
  survives_ = survives_ && join.survives;
  min_workers_ = std::max<std::size_t>(min_workers_, join.min_workers);
}

// To a newcomer that knows nothing: what the job is, as soon as that is known.
void Centre::welcome(Peers::iterator peer) {
  if (!description_ || peer->second.join->standing != Standing::kNew) return;
  send(peer->first, MessageKind::kWelcome, encode(*description_));
}

void Centre::hear(int rank, const Message& message, Time now) {
  switch (message.kind) {
    case MessageKind::kReport:
      if (const auto report = decode_report(message.body)) {
        if (report->generation != tag()) return;
        const Error& error = report->error;
        // It heard nothing from this centre for the timeout, and goes to another one.
        const bool lost_us =
            error.code() == ErrorCode::kPeerLost && error.rank() == roster_->centre.rank;
        if (lost_us && (woke_ || in_doubt(now))) return miss(rank, now);
        const bool aborts = error.code() == ErrorCode::kAborted;
        const bool enters = phase_ == Phase::kForming && place(rank).enters && !aborts;
        const bool own_fault = error.rank() == rank || (error.rank() < 0 && !lost_us);
        place(rank).failed = enters || own_fault;
        place(rank).lost_us = lost_us;
        if (enters) return health_->cannot_enter(rank, error, now);
        return health_->report(rank, *report, now);
      }
      break;
    case MessageKind::kHeartbeat:
    case MessageKind::kGoodbye:
      if (auto heard = decode_pulse(message.body)) {
        if (heard->generation != tag()) heard->progress.clear();  // of the one before
        if (message.kind == MessageKind::kHeartbeat) {
          return health_->heartbeat(rank, std::move(heard->progress), now);
        }
        if (!place(rank).failed) place(rank).left = true;  // else it has said why it goes
        told_ = {};
        if (phase_ == Phase::kForming && !place(rank).failed) {  // all are needed to begin
          return lose(Error(ErrorCode::kPeerLost, name_of(place(rank).card) + " has left", rank),
                      now);
        }
        return health_->goodbye(rank, std::move(heard->progress), now);
      }
      break;
    case MessageKind::kReady:
      if (const auto generation = decode_tag(message.body)) {
        if (*generation != tag() || phase_ != Phase::kForming) return;
        if (!std::exchange(place(rank).ready, true)) --awaited_;
        return go_if_ready();
      }
      break;
    default: break;
  }
  const Error error(ErrorCode::kUnexpectedMessage,
                    fmt::format("sent a malformed {}", to_string(message.kind)), rank);
  health_->report(rank, {error, {}, tag()}, now);
}

// A member of a generation that has ended, before the next one.
void Centre::hear_between(int rank, const Message& message, Time now) {
  if (message.kind == MessageKind::kGoodbye) {
    take_away(rank, Departure::Kind::kLeft, "");
    return form_if_complete(now);
  }
  if (message.kind != MessageKind::kReport) return;
  const auto report = decode_report(message.body);
  if (!report || report->generation != tag() || place(rank).answered) return;
  if (report->error.code() == ErrorCode::kAborted) {
    return end_job(aborted_error(name_of(place(rank).card), rank, report->error.message()));
  }
  // Others have left the generation already: that is what it sees.
  if (place(rank).link) {
    send(*place(rank).link, MessageKind::kEnd, encode(GenerationEnd{tag(), report->error}));
  }
}

void Centre::report(const Error& seen, std::optional<std::uint32_t> generation, Time now) {
  if (phase_ == Phase::kGathering) return end_job(seen);
  if (!in_generation() || generation.value_or(tag()) != tag()) return;
  health_->centre_report(name_of(options_.card), seen, now);
  decide(now);
}

void Centre::start_job(Time now) {
  Roster roster = gathering_.roster();
  if (const auto error = check_reachable(roster)) return end_job(*error);
  std::vector<std::string> names;
  std::vector<Place> places;
  for (const Card& card : roster) {
    names.push_back(name_of(card));
    places.push_back({.card = card});
  }
  set_places(std::move(places));
  set_reach();
  for (auto& [link, peer] : peers_) {
    if (!peer.join) continue;
    const auto found = ranks_.find(peer.join->card.id);
    if (found == ranks_.end()) continue;  // it was invited, and the others came first
    const int rank = peer.rank = found->second;
    peer.heard = now;  // until now it had nothing to say
    place(rank).link = link;
    survives_ = survives_ && peer.join->survives;
    min_workers_ = std::max<std::size_t>(min_workers_, peer.join->min_workers);
  }
  generation_ = {1, options_.make_id()};
  health_.emplace(std::move(names), options_.timeout, now);
  phase_ = Phase::kRunning;
  told_ = {};
  last_word_ = next_heartbeat_ = now;
  roster_ = message_of(std::move(roster));
  send_rosters({}, 0);
}

// The newest generation, of these members.
RosterMessage Centre::message_of(Roster roster) const {
  return {.centre = options_.card,
          .timeout = std::chrono::ceil<std::chrono::milliseconds>(options_.timeout),
          .generation = generation_,
          .survives = survives_,
          .step = step_,
          .roster = std::move(roster)};
}

void Centre::end_job(const Error& verdict) {
  if (verdict_) return;
  verdict_ = verdict;
  next_heartbeat_ = Time::max();
  send_to_all(MessageKind::kVerdict, encode_wire_error(verdict));
}

void Centre::lose(const Error& why, Time now) {
  if (!survives_ || !is_loss(why)) return end_job(why);
  if (woke_ && options_.moves) return resign();
  const Error seen(why.code(), std::string(why.message()), why.rank());
  const Place& lost = place(why.rank());
  auto kind = Departure::Kind::kExpelled;
  if (!lost.link) kind = Departure::Kind::kDied;
  if (lost.failed) kind = Departure::Kind::kFailed;
  const auto take_it_away = [&] { take_away(why.rank(), kind, std::string(seen.message())); };
  // Its last words count, not that its connection has closed. One that is connected hears the end.
  if (!lost.link) take_it_away();
  if (in_generation()) {
    end_generation(seen, now);
  } else {  // those who have not heard yet that the generation has ended
    const SharedBytes bytes = shared_frame(MessageKind::kEnd, encode(GenerationEnd{tag(), seen}));
    if (!std::exchange(told_end_, true)) {
      for (const Place& at : places_) {
        if (at.link && !at.answered && !at.gone) sendings_.push_back({*at.link, bytes});
      }
    } else if (lost.link && !lost.answered && !lost.gone) {  // it learns that it is lost itself
      sendings_.push_back({*lost.link, bytes});
    }
  }
  take_it_away();
  form_if_complete(now);
}

void Centre::take_away(int rank, Departure::Kind kind, const std::string& why) {
  Place& at = place(rank);
  if (at.gone) return;
  at.gone = true;
  if (phase_ == Phase::kRegrouping && !at.answered) --awaited_;
  if (at.left) kind = Departure::Kind::kLeft;
  at.left = kind == Departure::Kind::kLeft;
  if (at.departure.name.empty())
    at.departure = {rank, kind, name_of(at.card), without_name(why, name_of(at.card))};
  events_.push_back({at.card, at.departure});
  if (!at.link) return;
  hang_up(peers_.find(*at.link));
  at.link.reset();
}

void Centre::process_ended(const HostIdentity& host, std::int32_t pid, const std::string& how,
                           bool own_fault) {
  for (Place& at : places_) {
    // On other hosts, and in other containers of this one, others have the same number.
    if (at.card.pid != pid || !same_host(at.card.host, host) || at.left) continue;
    const auto kind = own_fault ? Departure::Kind::kFailed : Departure::Kind::kDied;
    at.departure = {at.card.rank, kind, name_of(at.card), how};
  }
}

void Centre::end_generation(const Error& why, Time now) {
  const SharedBytes bytes = shared_frame(MessageKind::kEnd, encode(GenerationEnd{tag(), why}));
  for (const Place& at : places_) {
    if (at.link && !at.gone) sendings_.push_back({*at.link, bytes});
  }
  start_regrouping(now);
  told_end_ = true;
}

void Centre::start_regrouping(Time now) {
  if (in_generation() && !woke_) {  // who has gone already will not answer
    for (Place& at : places_) {
      if (at.left) take_away(at.card.rank, Departure::Kind::kLeft, "");
      if (!at.link) take_away(at.card.rank, Departure::Kind::kDied, "its connection closed");
    }
  }
  phase_ = Phase::kRegrouping;
  since_ = now;
  next_heartbeat_ = std::min(next_heartbeat_, now);
  may_wait_ = told_end_ = false;
  health_.reset();
  for (Place& at : places_) at.answered = at.waits = at.enters = at.ready = false;
  awaited_ = static_cast<std::size_t>(std::ranges::count(places_, false, &Place::gone));
}

// The members tell who they were; nobody else knows any more.
void Centre::expect_again(const Join& join, Time now) {
  if (join.card.world_size < 1 || join.card.rank < 0 || join.card.rank >= join.card.world_size) {
    return;
  }
  generation_ = join.last;
  for (auto& [link, peer] : peers_) {  // of one before that
    if (std::exchange(peer.rank, -1) >= 0) prepare(link);
  }
  set_places(std::vector<Place>(index_of(join.card.world_size)));
  for (int rank = 0; rank < join.card.world_size; ++rank) place(rank).card.rank = rank;
  start_regrouping(now);
}

// While the next generation is under way: who is silent, or does not do its part, is lost.
void Centre::judge_silence(Time now) {
  const Clock::duration timeout = options_.timeout;
  if (phase_ == Phase::kForming) {
    if (now - since_ < kReadyTimeouts * timeout) return;
    // Others may wait for a newcomer that cannot reach them: it is the first to go.
    const auto late = [](const Place& at) { return !at.gone && !at.ready; };
    const auto is_late_newcomer = [&](const Place& at) { return at.enters && late(at); };
    auto found = std::ranges::find_if(places_, is_late_newcomer);
    if (found == places_.end()) found = std::ranges::find_if(places_, late);
    if (found == places_.end()) return;
    return lose(Error(ErrorCode::kTimeout, name_of(found->card) + " did not get ready in time",
                      static_cast<int>(found - places_.begin())),
                now);
  }
  for (int rank = 0; rank < static_cast<int>(places_.size()) && !verdict_; ++rank) {
    const Place& at = place(rank);
    if (at.gone) continue;
    const auto name = [&] { return name_of(at.card); };
    if (!at.link) {
      // It may have called another first, which stood still for the whole timeout.
      if (now - since_ < timeout + timeout / 4) continue;
      lose(Error(ErrorCode::kPeerLost, name() + " did not come to the new centre in time", rank),
           now);
    } else if (now - peers_.at(*at.link).heard >= timeout) {
      lose(Error(ErrorCode::kPeerLost,
                 fmt::format("{} has been silent for {}: stopped or cut off", name(),
                             format_duration(timeout)),
                 rank),
           now);
    } else if (!at.answered && now - since_ >= kAnswerTimeouts * timeout) {
      lose(Error(ErrorCode::kTimeout, name() + " did not join the next generation in time", rank),
           now);
    }
    if (phase_ != Phase::kRegrouping || resigned_) return;
  }
}

// As many as there is work for.
std::size_t Centre::most_members() const {
  return description_ && description_->most_workers > 0 ? description_->most_workers
                                                        : kMaxWorldSize;
}

bool Centre::can_enter(LinkId link, Time now) const {
  return now - peers_.at(link).heard < options_.timeout / 2;
}

// Those who can be let in now.
std::vector<Centre::LinkId> Centre::newcomers(std::size_t survivors, Time now) const {
  std::vector<LinkId> found;
  if (prepared_.empty()) return found;
  Reach reach;
  for (const Place& at : places_) {
    if (!at.gone) reach.add(at.card);
  }
  for (const auto& [link, id] : prepared_) {
    if (survivors + found.size() >= most_members()) break;
    const Card& card = peers_.at(link).join->card;
    if (!can_enter(link, now) || reach.conflict(card)) continue;
    reach.add(card);
    found.push_back(link);
  }
  return found;
}

bool Centre::newcomers_wait(Time now) const {
  return places_.size() < most_members() && std::ranges::any_of(prepared_, [&](const auto& each) {
           return can_enter(each.first, now);
         });
}

// Who is prepared and will wait until a member goes is told so, once.
void Centre::tell_spares() {
  if (phase_ != Phase::kRunning || places_.size() < most_members()) return;
  for (const auto& [link, id] : prepared_) {
    if (std::exchange(peers_.at(link).spare, true)) continue;
    send(link, MessageKind::kWish, encode(Wish{.stop = kSpare}));
  }
}

void Centre::forget_silent_newcomers(Time now) {
  for (auto next = prepared_.begin(); next != prepared_.end();) {
    const auto peer = peers_.find((next++)->first);
    if (now - peer->second.heard >= options_.timeout) hang_up(peer);
  }
}

void Centre::form_if_complete(Time now) {
  if (phase_ != Phase::kRegrouping || verdict_ || woke_ || resigned_) return;
  if (awaited_ > 0) return;
  const auto survivors = static_cast<std::size_t>(std::ranges::count(places_, false, &Place::gone));
  const bool all_wait =
      std::ranges::all_of(places_, [](const Place& at) { return at.gone || at.waits; });
  const auto added = newcomers(survivors, now);
  const std::size_t total = survivors + added.size();
  const bool too_few = total < min_workers_;
  may_wait_ = total == 0 || (too_few && all_wait);
  if (!may_wait_) form(added, too_few, now);
}

void Centre::form(const std::vector<LinkId>& newcomers, bool too_few, Time now) {
  RosterChange change{.base = generation_,
                      .centre = options_.card,
                      .generation = {generation_.number + 1, options_.make_id()},
                      .too_few = too_few,
                      .newcomers = 0,
                      .step = step_,
                      .departed = {},
                      .added = {}};
  change.centre.rank = -1;  // unless its own process has a place
  if (change.centre.title.empty()) change.centre.title = "the centre";
  std::vector<Place> next;
  for (const Place& at : places_) {
    if (at.gone) {
      change.departed.push_back(at.departure);
    } else {
      next.push_back({.card = at.card, .link = at.link, .enters = at.enters});
    }
  }
  const std::size_t survivors = next.size();
  for (const LinkId link : newcomers) {
    next.push_back({.card = peers_.at(link).join->card, .link = link, .enters = true});
    change.added.push_back(next.back().card);
  }
  // One that has begun and stands behind one that has not counts as it does: ranks say who is new.
  const auto first_new = std::ranges::find(next, true, &Place::enters);
  for (auto each = first_new; each != next.end(); ++each) each->enters = true;
  change.newcomers = static_cast<std::uint32_t>(next.end() - first_new);
  const bool known = roster_.has_value();  // to those who get the difference only
  set_places(std::move(next));
  Roster roster;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    Card& card = places_[i].card;
    card.rank = static_cast<int>(i);
    card.world_size = static_cast<int>(places_.size());
    if (options_.member == card.id) change.centre.rank = card.rank;
    peers_.at(*places_[i].link).rank = card.rank;
    if (i >= survivors) {
      unprepare(*places_[i].link);
      events_.push_back({card});
    }
    names.push_back(name_of(card));
    roster.push_back(card);
  }
  set_reach();
  generation_ = change.generation;
  roster_ = message_of(std::move(roster));
  roster_->centre = change.centre;
  roster_->too_few = too_few;
  roster_->newcomers = change.newcomers;
  roster_->departed = change.departed;
  phase_ = Phase::kForming;
  awaited_ = places_.size();
  since_ = now;
  health_.emplace(std::move(names), options_.timeout, now);
  send_rosters(change, known ? survivors : 0);
  dismiss_out_of_reach();
}

// Survivors know the roster before; the others get the whole one.
void Centre::send_rosters(const RosterChange& change, std::size_t survivors) {
  SharedBytes difference;
  SharedBytes whole;
  if (survivors > 0) difference = shared_frame(MessageKind::kRosterChange, encode(change));
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (i >= survivors && !whole) whole = shared_frame(MessageKind::kRoster, encode(*roster_));
    sendings_.push_back({*places_[i].link, i < survivors ? difference : whole});
  }
}

void Centre::go_if_ready() {
  if (phase_ != Phase::kForming || awaited_ > 0) return;
  phase_ = Phase::kRunning;
  told_ = {};
  const SharedBytes bytes = shared_frame(MessageKind::kGo, encode_tag(tag()));
  for (const Place& at : places_) {
    if (at.link) sendings_.push_back({*at.link, bytes});
  }
}

void Centre::send_wish(Time now) {
  const auto first =
      std::ranges::find_if(places_, [](const Place& at) { return at.link && !at.left; });
  if (first == places_.end()) return;
  Wish wish = wish_;
  wish.regroup = newcomers_wait(now);
  if (wish == told_) return;
  send(*first->link, MessageKind::kWish, encode(wish));
  told_ = wish;
}

void Centre::ask_flight(const HostIdentity& host, const std::vector<std::int32_t>& but) {
  const SharedBytes bytes = shared_frame(MessageKind::kWish, encode(Wish{.stop = kWriteFlight}));
  for (const Place& at : places_) {
    const bool known = at.card.host == host && std::ranges::count(but, at.card.pid) > 0;
    if (at.link && !at.gone && !known) sendings_.push_back({*at.link, bytes});
  }
}

void Centre::send(LinkId link, MessageKind kind, std::span<const std::byte> body, bool last) {
  sendings_.push_back({link, shared_frame(kind, body), last});
}

void Centre::send_to_all(MessageKind kind, std::span<const std::byte> body) {
  const SharedBytes bytes = shared_frame(kind, body);
  for (const auto& [link, peer] : peers_) {
    if (peer.join) sendings_.push_back({link, bytes});
  }
}

// Looks at the time with every event, before anything is concluded from what came meanwhile.
void Centre::notice_pause(Time now) {
  if (resigned_) return;
  const Clock::duration slept = now - last_event_;
  if (slept > options_.timeout / 2) {  // nobody could be heard
    in_doubt_until_ = now + options_.timeout;
    since_ = excuse_own_pause(since_, last_event_, now, options_.timeout);
    for (auto& [link, peer] : peers_) {
      peer.heard = excuse_own_pause(peer.heard, last_event_, now, options_.timeout);
      peer.back.reset();
    }
  }
  last_event_ = now;
  if (phase_ == Phase::kGathering || !survives_ || verdict_) return;
  // The members count from the last heartbeat on, which may be a while before the pause. Those of a
  // centre that stays where it is come again: in doubt it waits for them.
  const Clock::duration unheard = std::max(slept, now - last_word_);
  if (options_.moves ? unheard >= options_.timeout : slept >= options_.timeout / 2) {
    woke_ = last_word_ = now;
  }
  if (!woke_ || now == *woke_) return;
  // What a member sent before it left may come after the pause, too, but then all at once and with
  // the end of its link.
  const bool all_are_back = std::ranges::all_of(places_, [&](const Place& at) {
    if (at.gone) return true;
    if (!at.link) return false;
    const Peer& peer = peers_.at(*at.link);
    return peer.back && peer.heard - *peer.back >= options_.timeout / 10;
  });
  if (!all_are_back) return;
  woke_.reset();
  next_heartbeat_ = now;  // none was sent meanwhile
}

// A member that heard nothing from this centre for the timeout may be right: the centre has paused,
// though not for so long as it counts itself. What it said before took a while to leave.
bool Centre::in_doubt(Time now) const { return options_.moves && now < in_doubt_until_; }

// A member has gone while this process stood still: to another centre, or it will come again.
void Centre::miss(int rank, Time now) {
  if (options_.moves) return resign();
  if (!in_generation()) return;
  end_generation(Error(ErrorCode::kPeerLost,
                       fmt::format("{} stood still for longer than {}", name_of(options_.card),
                                   format_duration(options_.timeout)),
                       rank),
                 now);
}

void Centre::resign() {
  resigned_ = true;
  for (const auto& [link, peer] : peers_) sendings_.push_back({link, nullptr, true});
  peers_.clear();
  silent_.clear();
}

void Centre::tick(Time now) {
  notice_pause(now);
  if (resigned_) return;
  while (!silent_.empty() && now >= silent_.begin()->first) {
    hang_up(peers_.find(silent_.begin()->second));
  }
  if (health_) health_->tick(now);
  decide(now);
}

void Centre::decide(Time now) {
  if (verdict_) return;
  if (phase_ == Phase::kGathering) {
    if (now >= gathering_.deadline()) return end_job(gathering_.missing());
    if (now < next_heartbeat_) return;
    // The others have heard nothing yet, and expect nothing but a roster.
    const SharedBytes bytes = shared_frame(MessageKind::kHeartbeat, encode(Pulse{tag()}));
    for (const auto& [link, peer] : peers_) {
      const bool prepared = peer.join && peer.join->standing == Standing::kPrepared;
      if (peer.invited || prepared) sendings_.push_back({link, bytes});
    }
    next_heartbeat_ = now + between_heartbeats();
    return;
  }
  if (in_generation()) {
    if (health_->take_ping()) send_to_all(MessageKind::kPing, {});
    if (health_->verdict()) {
      const Error why = *health_->verdict();
      lose(why, now);
    }
  }
  if (phase_ != Phase::kRunning && !verdict_) {
    if (now >= next_judgement_) {
      next_judgement_ = now + options_.timeout / kJudgements;
      judge_silence(now);
    }
    form_if_complete(now);
    const Clock::duration margin = margin_of(patience_);
    if (may_wait_ && phase_ == Phase::kRegrouping && now >= later(since_, patience_ - margin)) {
      end_job(Error(ErrorCode::kPeerLost,
                    fmt::format("{} of the {} workers that the job needs are left, and no others "
                                "came in {}",
                                std::ranges::count(places_, false, &Place::gone), min_workers_,
                                format_duration(patience_))));
    }
  }
  if (verdict_ || resigned_) return;
  if (phase_ == Phase::kRunning) send_wish(now);
  if (now >= next_heartbeat_) {
    forget_silent_newcomers(now);
    tell_spares();
    // Until all are back after a pause, others may have a centre already: nobody is to rely on this
    // one.
    if (!woke_ || !options_.moves) send_to_all(MessageKind::kHeartbeat, encode(Pulse{tag()}));
    last_word_ = now;
    next_heartbeat_ = now + between_heartbeats();
  }
}

Centre::Clock::duration Centre::between_heartbeats() const {
  return std::min<Clock::duration>(options_.timeout / 5, kLongestBetweenHeartbeats);
}

bool Centre::all_left() const {
  if (phase_ == Phase::kRunning) return health_->all_left();
  return phase_ == Phase::kRegrouping && std::ranges::all_of(places_, &Place::left);
}

void Centre::leave(const std::vector<Progress>& progress, Time now) {
  if (health_ && !verdict_) {
    if (options_.member && roster_->centre.rank >= 0 && phase_ == Phase::kRunning) {
      health_->goodbye(roster_->centre.rank, progress, now);
    }
    health_->settle();
    if (health_->verdict() && !survives_) end_job(*health_->verdict());
  }
  send_to_all(MessageKind::kGoodbye, encode(Pulse{tag(), progress}));
}

Centre::Time Centre::wake_at() const {
  Time wake = next_heartbeat_;
  if (phase_ == Phase::kGathering && !verdict_) wake = std::min(wake, gathering_.deadline());
  if (health_) wake = std::min(wake, health_->wake_at());
  const bool judges = phase_ == Phase::kRegrouping || phase_ == Phase::kForming;
  if (judges && !verdict_ && !resigned_) {
    wake = std::min(wake, next_judgement_);
  }
  if (!silent_.empty()) wake = std::min(wake, silent_.begin()->first);
  return wake;
}

}  // namespace lockstep
