#include "lockstep/net/job/gathering.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/text.h"
#include "lockstep/net/socket/address.h"

namespace lockstep {

Gathering::Gathering(int world_size, std::string version, Time deadline)
    : world_size_(world_size), version_(std::move(version)), deadline_(deadline) {}

std::optional<Error> Gathering::add(const Card& card, Time gives_up) {
  if (card.version != version_) {
    return Error(ErrorCode::kVersionMismatch,
                 fmt::format("{} runs lockstep {}, the rendezvous {}", name_of(card), card.version,
                             version_),
                 card.rank);
  }
  if (card.world_size != world_size_) {
    return Error(ErrorCode::kInvalidWorldSize,
                 fmt::format("{} was started for a world of {}, the rendezvous for {}",
                             name_of(card), card.world_size, world_size_),
                 card.rank);
  }
  if (card.rank < 0 || card.rank >= world_size_) {
    return Error(ErrorCode::kInvalidRank,
                 fmt::format("{} is out of range: a world of {} has ranks 0 to {}", name_of(card),
                             world_size_, world_size_ - 1),
                 card.rank);
  }
  if (!SocketAddress::parse(card.mesh_address)) {
    return Error(ErrorCode::kUnexpectedMessage,
                 fmt::format("{} says that it listens on '{}'", name_of(card), card.mesh_address),
                 card.rank);
  }
  const auto [entry, added] = present_.try_emplace(card.rank, card);
  if (!added) {
    const Card& other = entry->second;
    return Error(
        ErrorCode::kInvalidRank,
        fmt::format("rank {} was started twice: on {}, pid {}, and on {}, pid {}", card.rank,
                    other.host.hostname, other.pid, card.host.hostname, card.pid),
        card.rank);
  }
  went_away_.erase(card.rank);
  deadline_ = std::min(deadline_, gives_up);
  return std::nullopt;
}

void Gathering::forget(int rank) {
  const auto entry = present_.find(rank);
  if (entry == present_.end()) return;
  went_away_[rank] = name_of(entry->second);
  present_.erase(entry);
}

Roster Gathering::roster() const {
  LOCKSTEP_CHECK(complete());
  Roster roster;
  for (const auto& [rank, card] : present_) roster.push_back(card);
  return roster;
}

Error Gathering::missing() const {
  constexpr std::size_t kNamed = 20;
  std::vector<std::string> names;
  int first = -1;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (present_.contains(rank)) continue;
    if (first < 0) first = rank;
    const auto gone = went_away_.find(rank);
    names.push_back(gone == went_away_.end()
                        ? fmt::format("rank {}", rank)
                        : fmt::format("{}, which came and went", gone->second));
  }
  const std::size_t missing = names.size();
  if (missing > kNamed) {
    names.resize(kNamed);
    names.push_back(fmt::format("and {} more", missing - kNamed));
  }
  return Error(ErrorCode::kTimeout,
               fmt::format("{} of {} ranks did not come to the rendezvous in time: {}", missing,
                           world_size_, list_of(names, ", ")),
               first);
}

std::optional<Error> check_reachable(const Roster& roster) {
  const auto elsewhere = std::ranges::find_if(
      roster, [&](const Card& card) { return !same_host(card.host, roster.front().host); });
  if (elsewhere == roster.end()) return std::nullopt;
  for (const Card& card : roster) {
    const auto address = SocketAddress::parse(card.mesh_address);
    if (!address || !address->is_loopback()) continue;
    const Card& far = same_host(card.host, elsewhere->host) ? roster.front() : *elsewhere;
    return Error(ErrorCode::kNoConnection,
                 fmt::format("{} listens on {}, which {} on another host cannot reach; choose its "
                             "network with --interface",
                             name_of(card), card.mesh_address, name_of(far)),
                 card.rank);
  }
  return std::nullopt;
}

}  // namespace lockstep
