#include "lockstep/net/job/roster.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "lockstep/base/cores.h"
#include "lockstep/base/index.h"
#include "lockstep/base/text.h"

namespace lockstep {

bool is_member(const Roster& roster, const PeerIdentity& peer) {
  return peer.rank >= 0 && peer.rank < static_cast<int>(roster.size()) &&
         roster[index_of(peer.rank)].id == peer.id;
}

int cores_for_each(const Roster& roster, int rank) {
  int ranks_here = 0;
  std::vector<std::string> lists;
  for (const Card& card : roster) {
    if (!same_host(card.host, roster[index_of(rank)].host)) continue;
    ++ranks_here;
    lists.push_back(card.cores);
  }
  return count_cores(lists) / ranks_here;
}

int least_cores_for_each(const Roster& roster) {
  int least = std::numeric_limits<int>::max();
  for (auto card = roster.begin(); card != roster.end(); ++card) {
    const bool seen = std::any_of(roster.begin(), card, [&](const Card& earlier) {
      return same_host(earlier.host, card->host);
    });
    if (!seen)
      least = std::min(least, cores_for_each(roster, static_cast<int>(card - roster.begin())));
  }
  return least;
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
