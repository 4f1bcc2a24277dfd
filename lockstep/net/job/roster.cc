#include "lockstep/net/job/roster.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>
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
  std::vector<const Card*> by_host;
  for (const Card& card : roster) by_host.push_back(&card);
  std::ranges::sort(by_host, {}, [](const Card* card) {
    return std::tie(card->host.boot_id, card->host.network_namespace);  // as same_host() compares
  });
  int least = std::numeric_limits<int>::max();
  for (auto first = by_host.begin(); first != by_host.end();) {
    std::vector<std::string> lists;
    auto card = first;
    for (; card != by_host.end() && same_host((*card)->host, (*first)->host); ++card) {
      lists.push_back((*card)->cores);
    }
    least = std::min(least, count_cores(lists) / static_cast<int>(card - first));
    first = card;
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
