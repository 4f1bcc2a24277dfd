#include "lockstep/net/job/member.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/net/job/job_health.h"
#include "lockstep/wire/control_messages.h"
#include "lockstep/wire/wire_error.h"

namespace lockstep {

Member::Member(Link link, MemberOptions options, FailureLatch& latch, Ask progress)
    : options_(std::move(options)),
      latch_(latch),
      progress_(std::move(progress)),
      link_(std::move(link)),
      last_heard_(Clock::now()),
      last_look_(last_heard_),
      next_heartbeat_(last_heard_) {
  link_.socket().set_peer(name_of(options_.centre), options_.centre.rank);
  link_.set_limit(kMaxControlBody);
}

Member::~Member() {
  link_.flush();
  link_.socket().close_gently();
}

void Member::add_poll(std::vector<pollfd>& entries) const {
  const short events = link_.wants_to_send() ? POLLIN | POLLOUT : POLLIN;
  entries.push_back({link_.socket().fd(), events, 0});
}

Member::Clock::time_point Member::wake_at() const {
  if (latch_.tripped()) return Clock::time_point::max();
  if (!connected()) return centre_left() ? next_heartbeat_ : Clock::time_point::max();
  return std::min(next_heartbeat_, last_heard_ + options_.timeout);
}

void Member::serve(std::span<const pollfd> entries) {
  const auto now = Clock::now();
  if (connected()) {
    if (entries.front().revents != 0) link_.pump();
    // The first may have come together with the roster.
    while (const auto message = link_.next()) receive(*message, now);
    if (link_.failure()) {
      const bool closed = link_.failure()->code() == ErrorCode::kChannelClosed;
      lose_centre(closed ? "died: its connection closed"
                         : fmt::format("is out of reach: {}", link_.failure()->message()));
    }
  }
  // What was said during a pause has been read above.
  last_heard_ = excuse_own_pause(last_heard_, last_look_, now, options_.timeout);
  last_look_ = now;
  if (connected() && !latch_.tripped() && now - last_heard_ >= options_.timeout) {
    const std::string how = fmt::format("has been silent for {}: stopped or cut off",
                                        format_duration(options_.timeout));
    // If it ever wakes, let it know why we left.
    report(Error(ErrorCode::kPeerLost, how, options_.centre.rank));
    link_.flush();
    lose_centre(how);
  }
  if (now >= next_heartbeat_) {
    next_heartbeat_ = now + options_.timeout / 5;
    if (centre_left()) {
      check_centre_left();
    } else {
      send_heartbeat(now);
    }
  }
  link_.flush();
}

void Member::receive(const Message& message, Clock::time_point now) {
  last_heard_ = now;
  switch (message.kind) {
    case MessageKind::kHeartbeat: return;
    case MessageKind::kPing: return send_heartbeat(now);
    case MessageKind::kVerdict:
      if (const auto verdict = decode_wire_error(message.body)) {
        latch_.trip(verdict->error());
        return;
      }
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

void Member::send_heartbeat(Clock::time_point now) {
  next_heartbeat_ = now + options_.timeout / 5;
  if (connected()) link_.queue(MessageKind::kHeartbeat, encode(progress_()));
}

void Member::report(const Error& error) {
  if (connected()) link_.queue(MessageKind::kReport, encode(Report{error, progress_()}));
}

void Member::leave() {
  if (connected() && !centre_left()) link_.queue(MessageKind::kGoodbye, encode(progress_()));
}

void Member::lose_centre(std::string how) {
  link_.socket().close_gently();
  if (centre_left()) return;
  latch_.trip(Error(ErrorCode::kPeerLost, fmt::format("{} {}", name_of(options_.centre), how),
                    options_.centre.rank));
}

// Nobody watches any more, but whether we wait for the centre's own rank we can tell ourselves.
void Member::check_centre_left() {
  for (const Progress& at : progress_()) {
    const auto last = std::ranges::find(*centre_progress_, at.group, &Progress::group);
    if (!at.inside || last == centre_progress_->end() || last->sequence >= at.sequence) continue;
    latch_.trip(Error(ErrorCode::kPeerLost,
                      fmt::format("{} has left the job after collective {}; {} waits for it in "
                                  "collective {} ({})",
                                  name_of(options_.centre), last->sequence, options_.name,
                                  at.sequence, at.description),
                      options_.centre.rank));
    return;
  }
}

}  // namespace lockstep
