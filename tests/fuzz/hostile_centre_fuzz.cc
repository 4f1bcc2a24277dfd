// An honest member and a centre that does as the input says. The member never crashes, takes only
// generations that it is in, and does not wait beyond its patience.
#include <algorithm>
#include <vector>

#include "lockstep/net/job/member.h"
#include "lockstep/wire/control_messages.h"
#include "lockstep/wire/wire_error.h"
#include "tests/fuzz/script.h"

using namespace lockstep;
using fuzz::require;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Script script(data, std::min<std::size_t>(size, 4000));
  auto now = Member::Time() + std::chrono::hours(1);
  Card card;
  card.rank = script.byte() % 2 == 0 ? 1 : -1;
  card.world_size = card.rank < 0 ? 0 : 3;
  card.version = "1";
  card.id[0] = std::byte{9};
  const std::vector<Progress> progress = {{0, 5, true, "all_reduce", 2}};
  Member member(
      {.card = card,
       .patience = std::chrono::seconds(5),
       .timeout = std::chrono::seconds(1),
       .survives = script.byte() % 2 == 1},
      [&] { return progress; }, now);
  std::uint32_t number = 1;
  const auto roster = [&] {
    RosterMessage message;
    message.centre = {static_cast<int>(script.byte() % 4) - 1, "the coordinator", "node", 1};
    message.timeout = std::chrono::milliseconds(1 + script.byte());
    message.generation.number = number++;
    message.survives = script.byte() % 2 == 1;
    const int ranks = 1 + script.byte() % 4;
    const int own = script.byte() % 5;
    for (int rank = 0; rank < ranks; ++rank) {
      Card each = card;
      each.rank = rank;
      each.world_size = ranks;
      each.id[0] = rank == own ? std::byte{9} : static_cast<std::byte>(100 + rank);
      message.roster.push_back(each);
    }
    return message;
  };
  while (!script.ended()) {
    switch (script.byte() % 10) {
      case 0:
        member.received({static_cast<MessageKind>(script.byte()), script.bytes(script.byte())},
                        now);
        break;
      case 1: member.received({MessageKind::kRoster, encode(roster())}, now); break;
      case 2: member.received({MessageKind::kGo, encode_tag(script.byte())}, now); break;
      case 3: {
        const Error error(static_cast<ErrorCode>(script.byte() % 21), "a verdict", script.byte());
        member.received({MessageKind::kVerdict, encode_wire_error(error)}, now);
        break;
      }
      case 4:
        member.received({MessageKind::kHeartbeat, encode(Pulse{script.byte(), {}})}, now);
        break;
      case 5: member.received({MessageKind::kGoodbye, encode(Pulse{0, progress})}, now); break;
      case 6:
        if (!member.waiting() && member.joined()) {
          member.join_again(static_cast<Standing>(2 + script.byte() % 3), 7, now);
        }
        break;
      case 7: member.ready(); break;
      case 8: member.lost(Error(ErrorCode::kChannelClosed, "closed")); break;
      default: now += std::chrono::milliseconds(10 * std::uint32_t{script.byte()}); break;
    }
    member.tick(now);
    member.take_sendings();
    if (const auto taken = member.take_roster()) {
      const auto own = std::ranges::find(taken->roster, card.id, &Card::id);
      require(own != taken->roster.end() && own->rank == member.rank());
    }
    require(member.failure() || member.wake_at() > now - std::chrono::seconds(10));
  }
  now += std::chrono::hours(1);
  member.tick(now);
  require(!member.waiting() || member.failure());
  return 0;
}
