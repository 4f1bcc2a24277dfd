#include "lockstep/net/roster.h"

#include <fmt/format.h>

#include "lockstep/base/error.h"
#include "lockstep/net/text.h"

namespace lockstep {

std::string name_of(const Card& card) {
  return fmt::format("rank {} ({}, pid {})", card.rank, card.host.hostname, card.pid);
}

void require_member(const Roster& roster, const PeerIdentity& peer) {
  if (peer.rank < 0 || peer.rank >= static_cast<int>(roster.size())) {
    throw Error(ErrorCode::kAuthentication,
                fmt::format("a process connected as rank {}; the job has {} ranks", peer.rank,
                            roster.size()));
  }
  if (roster[peer.rank].id != peer.id) {
    throw Error(ErrorCode::kAuthentication,
                fmt::format("a process connected as rank {} that is not {}", peer.rank,
                            name_of(roster[peer.rank])),
                peer.rank);
  }
}

std::string fingerprint_warning(const Roster& roster) {
  std::vector<std::string> others;
  for (const Card& card : roster) {
    if (card.fingerprint != roster.front().fingerprint) {
      others.push_back(fmt::format("{}: {}", name_of(card), card.fingerprint));
    }
  }
  if (others.empty()) return {};
  return fmt::format(
      "ranks run on different platforms, so bits may differ between world sizes: "
      "{}: {}; {}",
      name_of(roster.front()), roster.front().fingerprint, list_of(others, "; "));
}

}  // namespace lockstep
