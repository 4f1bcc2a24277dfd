// Decodes arbitrary bodies of every rendezvous and control message; the first byte is the kind.
// What decodes must encode to the same bytes, and may go on to the code that decides.
#include <cstdint>
#include <cstdlib>

#include "lockstep/net/job/gathering.h"
#include "lockstep/net/job/job_health.h"
#include "lockstep/net/job/reach.h"
#include "lockstep/net/job/roster.h"
#include "lockstep/wire/control_messages.h"
#include "lockstep/wire/join_messages.h"
#include "lockstep/wire/message.h"
#include "lockstep/wire/wire_error.h"

using namespace lockstep;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

template <typename T>
void require_same(std::span<const std::byte> body, const T& decoded) {
  const std::vector<std::byte> again = encode(decoded);
  require(std::equal(again.begin(), again.end(), body.begin(), body.end()));
}

JobHealth make_health() { return {{"a", "b", "c"}, std::chrono::seconds(10), JobHealth::Time{}}; }

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto body = std::as_bytes(std::span(data, size)).subspan(1);
  switch (static_cast<MessageKind>(data[0])) {
    case MessageKind::kJoin:
      if (const auto join = decode_join(body)) {
        require_same(body, *join);
        Gathering gathering(3, join->card.version, {});
        static_cast<void>(gathering.add(join->card, {}));
        static_cast<void>(gathering.missing());
      }
      break;
    case MessageKind::kRoster:
      if (const auto roster = decode_roster(body)) {
        require_same(body, *roster);
        static_cast<void>(check_reachable(roster->roster));
        static_cast<void>(fingerprint_warning(roster->roster));
      }
      break;
    case MessageKind::kHeartbeat:
    case MessageKind::kGoodbye:
      if (const auto pulse = decode_pulse(body)) {
        require_same(body, *pulse);
        JobHealth health = make_health();
        health.heartbeat(1, pulse->progress, {});
        health.goodbye(2, pulse->progress, {});
        health.settle();
      }
      break;
    case MessageKind::kReport:
      if (const auto report = decode_report(body)) {
        require_same(body, *report);
        JobHealth health = make_health();
        health.heartbeat(0, {{0, 1, true, "all_reduce"}}, {});
        health.report(1, *report, {});
        health.settle();
        health.tick(JobHealth::Time{} + std::chrono::seconds(1));
      }
      break;
    case MessageKind::kRosterChange:
      if (const auto change = decode_roster_change(body)) {
        require_same(body, *change);
        RosterMessage before{.generation = change->base, .roster = {}};
        before.roster.resize(3);
        for (int rank = 0; rank < 3; ++rank)
          before.roster[static_cast<std::size_t>(rank)].rank = rank;
        static_cast<void>(changed(before, *change));
      }
      break;
    case MessageKind::kWelcome:
    case MessageKind::kDescription:
      if (const auto description = decode_description(body)) require_same(body, *description);
      break;
    case MessageKind::kEnd:
      if (const auto end = decode_generation_end(body)) require_same(body, *end);
      break;
    case MessageKind::kWish:
      if (const auto wish = decode_wish(body)) require_same(body, *wish);
      break;
    case MessageKind::kReady:
    case MessageKind::kGo: static_cast<void>(decode_tag(body)); break;
    case MessageKind::kRedirect: static_cast<void>(decode_redirect(body)); break;
    case MessageKind::kVerdict:
    case MessageKind::kRefusal:
      if (const auto error = decode_wire_error(body)) {
        const auto again = encode_wire_error(error->error());
        require(std::equal(again.begin(), again.end(), body.begin(), body.end()));
      }
      break;
    default: break;
  }
  return 0;
}
