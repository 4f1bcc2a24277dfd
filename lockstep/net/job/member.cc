#include "lockstep/net/job/member.h"

#include <fmt/format.h>

#include <algorithm>

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
      last_heard_(now),
      last_look_(now),
      next_heartbeat_(now) {
  const auto patience = std::chrono::floor<std::chrono::milliseconds>(options_.patience);
  send(MessageKind::kJoin, encode(Join{options_.card, patience}));
}

void Member::send(MessageKind kind, std::span<const std::byte> body) {
  if (connected_) sendings_.push_back(shared_frame(kind, body));
}

void Member::received(const Message& message, Time now) {
  if (!connected_) return;
  last_heard_ = now;
  if (joined()) {
    hear(message, now);
  } else {
    answer(message, now);
  }
}

void Member::answer(const Message& message, Time now) {
  if (message.kind == MessageKind::kVerdict) {
    if (const auto verdict = decode_wire_error(message.body)) return fail(verdict->error());
  }
  if (message.kind == MessageKind::kGoodbye) {
    return fail(
        Error(ErrorCode::kPeerLost,
              fmt::format("{}, where the ranks meet, ended before all had come", options_.centre)));
  }
  auto roster = message.kind == MessageKind::kRoster ? decode_roster(message.body) : std::nullopt;
  const Card& own = options_.card;
  const auto place =
      roster ? std::ranges::find(roster->roster, own.id, &Card::id) : Roster::iterator();
  if (!roster || place == roster->roster.end() || (own.rank >= 0 && place->rank != own.rank) ||
      (own.world_size > 0 && place->world_size != own.world_size)) {
    return fail(Error(ErrorCode::kUnexpectedMessage,
                      fmt::format("{} answered with a {} that makes no sense", options_.centre,
                                  to_string(message.kind))));
  }
  rank_ = place->rank;
  name_ = name_of(*place);
  centre_ = roster->centre;
  timeout_ = roster->timeout;
  next_heartbeat_ = now;
  roster_ = std::move(roster);
}

void Member::hear(const Message& message, Time now) {
  switch (message.kind) {
    case MessageKind::kHeartbeat: return;
    case MessageKind::kPing: return send_heartbeat(now);
    case MessageKind::kVerdict:
      if (const auto verdict = decode_wire_error(message.body)) return fail(verdict->error());
      break;
    case MessageKind::kGoodbye:
      if (auto progress = decode_progress(message.body)) {
        centre_progress_ = std::move(*progress);
        return;
      }
      break;
    default: break;
  }
  lose_centre(fmt::format("sent a malformed {}", to_string(message.kind)));
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
  if (!joined()) {
    if (now >= gives_up_) {
      fail(Error(ErrorCode::kTimeout,
                 fmt::format("{} did not tell in time who the other ranks are", options_.centre)));
    }
    return;
  }
  // What was said during a pause has been heard before.
  last_heard_ = excuse_own_pause(last_heard_, last_look_, now, timeout_);
  last_look_ = now;
  if (connected_ && !failure_ && now - last_heard_ >= timeout_) {
    const std::string how =
        fmt::format("has been silent for {}: stopped or cut off", format_duration(timeout_));
    // If it ever wakes, let it know why we left.
    report(Error(ErrorCode::kPeerLost, how, centre_.rank));
    lose_centre(how);
  }
  if (now < next_heartbeat_) return;
  if (centre_left()) {
    next_heartbeat_ = now + timeout_ / 5;
    check_centre_left();
  } else {
    send_heartbeat(now);
  }
}

void Member::send_heartbeat(Time now) {
  next_heartbeat_ = now + timeout_ / 5;
  send(MessageKind::kHeartbeat, encode(progress_()));
}

void Member::report(const Error& error) {
  send(MessageKind::kReport, encode(Report{error, progress_()}));
}

void Member::leave() {
  if (joined() && !centre_left()) send(MessageKind::kGoodbye, encode(progress_()));
}

void Member::fail(const Error& error) {
  if (!failure_) failure_ = error;
}

void Member::lose_centre(const std::string& how) {
  connected_ = false;
  if (centre_left()) return;
  fail(Error(ErrorCode::kPeerLost, fmt::format("{} {}", name_of(centre_), how), centre_.rank));
}

// Nobody watches any more, but whether we wait for the centre's own rank we can tell ourselves.
void Member::check_centre_left() {
  for (const Progress& at : progress_()) {
    const auto last = std::ranges::find(*centre_progress_, at.group, &Progress::group);
    if (!at.inside || last == centre_progress_->end() || last->sequence >= at.sequence) continue;
    return fail(
        Error(ErrorCode::kPeerLost,
              fmt::format("{} has left the job after collective {}; {} waits for it in "
                          "collective {} ({})",
                          name_of(centre_), last->sequence, name_, at.sequence, at.description),
              centre_.rank));
  }
}

Member::Time Member::wake_at() const {
  if (failure_) return Time::max();
  if (!joined()) return gives_up_;
  if (!connected_) return centre_left() ? next_heartbeat_ : Time::max();
  return std::min(next_heartbeat_, last_heard_ + timeout_);
}

}  // namespace lockstep
