#include "lockstep/net/job/member.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/base/index.h"
#include "lockstep/base/text.h"
#include "lockstep/wire/wire_error.h"

namespace lockstep {
namespace {

Member::Time end_of(Member::Clock::duration patience, Member::Time now) {
  return patience > Member::Time::max() - now ? Member::Time::max() : now + patience;
}

}  // namespace

Member::Member(MemberOptions options, Ask progress, Time now)
    : options_(std::move(options)),
      progress_(std::move(progress)),
      gives_up_(end_of(options_.patience, now)),
      roster_(options_.last),
      timeout_(options_.timeout),
      last_heard_(now),
      last_look_(now),
      last_word_(now),
      next_heartbeat_(now),
      paused_(options_.paused),
      description_(options_.description) {
  if (roster_) {
    timeout_ = roster_->timeout;
    const auto own = std::ranges::find(roster_->roster, options_.card.id, &Card::id);
    rank_ = own == roster_->roster.end() ? -1 : own->rank;
    if (joined()) name_ = name_of(*own);
  }
  send_join(options_.standing, options_.step);
}

void Member::send(MessageKind kind, std::span<const std::byte> body) {
  if (connected_) sendings_.push_back(shared_frame(kind, body));
}

void Member::send_join(Standing standing, std::int64_t step) {
  Join join{.card = options_.card,
            .patience = std::chrono::floor<std::chrono::milliseconds>(options_.patience),
            .standing = standing,
            .survives = options_.survives,
            .min_workers = options_.min_workers,
            .last = {},
            .step = step};
  if (joined()) {
    join.card = roster_->roster[index_of(rank_)];
    join.last = roster_->generation;
  }
  send(MessageKind::kJoin, encode(join));
}

void Member::join_again(Standing standing, std::int64_t step, Time now) {
  waiting_ = true;
  may_go_ = false;
  wish_ = {};
  ended_.reset();
  gives_up_ = standing == Standing::kPrepared ? Time::max() : end_of(options_.patience, now);
  send_join(standing, step);
}

void Member::ready() { send(MessageKind::kReady, encode_tag(tag())); }

void Member::describe(Description description) {
  description_ = std::move(description);
  send_description();
}

void Member::tell(std::string_view line) {
  send(MessageKind::kLine, std::as_bytes(std::span(line)));
}

// The centre needs it once, from the first rank.
void Member::send_description() {
  if (!description_ || described_ || rank_ != 0 || waiting_) return;
  described_ = true;
  send(MessageKind::kDescription, encode(*description_));
}

void Member::received(const Message& message, Time now) {
  if (!connected_) return;
  notice_pause(now);  // before it is concluded from what came meanwhile that all is well
  last_heard_ = now;
  switch (message.kind) {
    case MessageKind::kRoster:
    case MessageKind::kRosterChange: return hear_roster(message, now);
    case MessageKind::kVerdict:
      if (const auto verdict = decode_wire_error(message.body)) return fail(verdict->error());
      break;
    case MessageKind::kWelcome:
      if (auto description = decode_description(message.body)) {
        description_ = std::move(description);
        welcomed_ = true;
        last_look_ = last_word_ = now;  // it had no reason to look before
        return;
      }
      break;
    case MessageKind::kRedirect:
      if (waiting_) {
        redirect_ = decode_redirect(message.body);
        connected_ = false;
        return;
      }
      break;
    default:
      if (joined() || welcomed_) return hear(message, now);
      break;
  }
  if (joined()) return lose_centre(fmt::format("sent a malformed {}", to_string(message.kind)));
  if (message.kind == MessageKind::kGoodbye) {
    return fail(
        Error(ErrorCode::kPeerLost,
              fmt::format("{}, where the ranks meet, ended before all had come", options_.centre)));
  }
  fail(Error(ErrorCode::kUnexpectedMessage, fmt::format("{} answered with a {} that makes no sense",
                                                        options_.centre, to_string(message.kind))));
}

void Member::hear_roster(const Message& message, Time now) {
  std::optional<RosterMessage> roster;
  if (message.kind == MessageKind::kRoster) {
    roster = decode_roster(message.body);
  } else if (const auto change = decode_roster_change(message.body); change && roster_) {
    roster = changed(*roster_, *change);
  }
  const Card& own = options_.card;
  const auto place =
      roster ? std::ranges::find(roster->roster, own.id, &Card::id) : Roster::iterator();
  const bool first = !joined() && !welcomed_ && options_.standing == Standing::kNew;
  if (!roster || !waiting_ || place == roster->roster.end() ||
      (first && ((own.rank >= 0 && place->rank != own.rank) ||
                 (own.world_size > 0 && place->world_size != own.world_size)))) {
    const std::string how =
        fmt::format("answered with a {} that makes no sense", to_string(message.kind));
    if (joined()) return lose_centre(how);
    return fail(Error(ErrorCode::kUnexpectedMessage, fmt::format("{} {}", options_.centre, how)));
  }
  rank_ = place->rank;
  name_ = name_of(*place);
  take_news(std::move(*roster), now);
}

void Member::take_news(RosterMessage roster, Time now) {
  waiting_ = false;
  may_go_ = roster.generation.number == 1;  // the first needs no signal
  centre_ = roster.centre;
  timeout_ = roster.timeout;
  next_heartbeat_ = now;
  wish_ = {};
  if (heard_since_pause(now)) paused_ = false;
  last_look_ = last_word_ = now;
  roster_ = std::move(roster);
  news_ = roster_;
  send_description();
}

void Member::hear(const Message& message, Time now) {
  switch (message.kind) {
    case MessageKind::kHeartbeat: return hear_heartbeat(now);
    case MessageKind::kPing: return send_heartbeat(now);
    case MessageKind::kGoodbye:
      if (auto last = decode_pulse(message.body)) {
        centre_progress_ = std::move(last->progress);
        return;
      }
      break;
    case MessageKind::kGo:
      if (const auto generation = decode_tag(message.body)) {
        may_go_ = may_go_ || (!waiting_ && *generation == tag());
        return;
      }
      break;
    case MessageKind::kEnd:
      if (const auto end = decode_generation_end(message.body)) {
        if (end->generation != tag()) return;
        if (end->error.rank() == rank_) set_paused();  // the others have lost us
        // Who asks for the next one already knows it.
        if (!waiting_ && !ended_) ended_ = end->error;
        return;
      }
      break;
    case MessageKind::kWish:
      if (const auto wish = decode_wish(message.body)) {
        if (wish->stop == kWriteFlight) {
          flight_asked_ = true;
        } else if (wish->stop == kSpare) {
          spare_ = true;
        } else {
          wish_ = *wish;
        }
        return;
      }
      break;
    default: break;
  }
  lose_centre(fmt::format("sent a malformed {}", to_string(message.kind)));
}

void Member::hear_heartbeat(Time now) {
  // Until it is in a generation it does not know how often the job wants to hear of it.
  if (!joined()) send_heartbeat(now);
  if (paused_ && !waiting_ && heard_since_pause(now)) paused_ = false;
}

// The others have counted from our last word on, which may be a while before the pause.
void Member::notice_pause(Time now) {
  if ((joined() || welcomed_) && now - std::min(last_look_, last_word_) >= timeout_) {
    set_paused();
  }
}

void Member::set_paused() {
  paused_ = paused_here_ = true;
  heard_after_pause_.reset();
}

// The centre that has not lost us goes on to tell us things. What it sent before it lost us may
// come after our pause, too, but then all at once and with the end of the link.
bool Member::heard_since_pause(Time now) {
  if (!paused_here_) return true;
  if (!heard_after_pause_) heard_after_pause_ = now;
  return now - *heard_after_pause_ >= timeout_ / 10;
}

void Member::lost(const Error& why) {
  if (!connected_) return;
  const bool closed = why.code() == ErrorCode::kChannelClosed;
  if (!joined()) {
    connected_ = false;
    return fail(Error(
        closed ? ErrorCode::kPeerLost : why.code(),
        fmt::format("{} went away before all ranks had come: {}", options_.centre, why.message())));
  }
  lose_centre(closed ? "died: its connection closed"
                     : fmt::format("is out of reach: {}", why.message()));
}

void Member::tick(Time now) {
  if (failure_) return;
  if (waiting_ && now >= gives_up_) {
    return fail(
        Error(ErrorCode::kTimeout,
              fmt::format("{} did not tell in time who the other ranks are", options_.centre)));
  }
  if (!joined() && !welcomed_) return;
  notice_pause(now);
  last_heard_ = excuse_own_pause(last_heard_, last_look_, now, timeout_);
  last_look_ = now;
  if (connected_ && now - last_heard_ >= timeout_) {
    const std::string time = format_duration(timeout_);
    // If it ever wakes, let it know why we left.
    report(Error(ErrorCode::kPeerLost,
                 fmt::format("heard nothing from {} for {}", name_of(centre_), time),
                 centre_.rank));
    lose_centre(fmt::format("has been silent for {}: stopped or cut off", time));
  }
  if (now >= next_heartbeat_) {
    if (centre_left()) {
      next_heartbeat_ = now + timeout_ / 5;
      check_centre_left();
    } else {
      send_heartbeat(now);
    }
  }
  last_word_ = next_heartbeat_ - timeout_ / 5;
}

void Member::send_heartbeat(Time now) {
  next_heartbeat_ = now + timeout_ / 5;
  send(MessageKind::kHeartbeat, encode(Pulse{tag(), progress_()}));
}

void Member::report(const Error& error) {
  send(MessageKind::kReport, encode(Report{error, progress_(), tag()}));
}

void Member::leave() {
  if (joined() && !centre_left()) {
    send(MessageKind::kGoodbye, encode(Pulse{tag(), progress_()}));
  }
}

void Member::fail(const Error& error) {
  if (!failure_) failure_ = error;
}

void Member::lose_centre(const std::string& how) {
  connected_ = false;
  if (centre_left() && !waiting_ && may_go_) return;  // the generation goes on without it
  const std::string who = joined() ? name_of(centre_) : options_.centre;
  const Error error(ErrorCode::kPeerLost, fmt::format("{} {}", who, how), centre_.rank);
  if (!survives()) return fail(error);
  if (!ended_) ended_ = error;
}

// Nobody watches any more, but whether we wait for the centre's own rank we can tell ourselves.
void Member::check_centre_left() {
  for (const Progress& at : progress_()) {
    const auto last = std::ranges::find(*centre_progress_, at.group, &Progress::group);
    const bool entered = last != centre_progress_->end();  // this group
    const bool in_vain = entered ? last->sequence < at.sequence : at.waits_for == centre_.rank;
    if (!at.inside || !in_vain) continue;
    const Error error(
        ErrorCode::kPeerLost,
        fmt::format("{} has left the job{}; {} waits for it in collective {} ({})",
                    name_of(centre_),
                    entered ? fmt::format(" after collective {}", last->sequence) : "", name_,
                    at.sequence, at.description),
        centre_.rank);
    if (!survives()) return fail(error);
    if (!ended_) ended_ = error;
    return;
  }
}

Member::Time Member::wake_at() const {
  if (failure_) return Time::max();
  Time wake = waiting_ ? gives_up_ : Time::max();
  if (welcomed_ || joined()) wake = std::min(wake, next_heartbeat_);
  if ((welcomed_ || joined()) && connected_) wake = std::min(wake, last_heard_ + timeout_);
  if (!connected_ && !centre_left()) {
    wake = waiting_ ? gives_up_ : Time::max();
    // To notice a pause of this process, it looks at the time.
    if (joined()) wake = std::min(wake, last_look_ + timeout_ / 5);
  }
  return wake;
}

}  // namespace lockstep
