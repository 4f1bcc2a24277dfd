#include "lockstep/net/job/gathering.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/text.h"
#include "lockstep/net/socket/address.h"

namespace lockstep {
namespace {

// The first of many names, and how many more there are.
std::string shortened(std::vector<std::string> names) {
  constexpr std::size_t kNamed = 20;
  if (names.size() > kNamed) {
    const std::size_t more = names.size() - kNamed;
    names.resize(kNamed);
    names.push_back(fmt::format("and {} more", more));
  }
  return list_of(names, ", ");
}

}  // namespace

Gathering::Gathering(int world_size, std::string version, Time deadline)
    : world_size_(world_size), version_(std::move(version)), deadline_(deadline) {}

std::optional<Error> Gathering::add(const Card& card, Time gives_up) {
  LOCKSTEP_CHECK(!complete());
  if (card.version != version_) {
    return Error(ErrorCode::kVersionMismatch,
                 fmt::format("{} runs lockstep {}, the rendezvous {}", name_of(card), card.version,
                             version_),
                 card.rank);
  }
  if (card.world_size != world_size_ && card.world_size != 0) {
    return Error(ErrorCode::kInvalidWorldSize,
                 fmt::format("{} was started for a world of {}, the rendezvous for {}",
                             name_of(card), card.world_size, world_size_),
                 card.rank);
  }
  if (card.rank < -1 || card.rank >= world_size_) {
    return Error(ErrorCode::kInvalidRank,
                 fmt::format("{} is out of range: a world of {} has ranks 0 to {}", name_of(card),
                             world_size_, world_size_ - 1),
                 card.rank);
  }
  if (!card.mesh_address.empty() && !SocketAddress::parse(card.mesh_address)) {
    return Error(ErrorCode::kUnexpectedMessage,
                 fmt::format("{} says that it listens on '{}'", name_of(card), card.mesh_address),
                 card.rank);
  }
  deadline_ = std::min(deadline_, gives_up);
  if (card.rank < 0) {
    without_rank_.push_back(card);
    return std::nullopt;
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
  return std::nullopt;
}

void Gathering::forget(const Card& card) {
  std::erase_if(without_rank_, [&](const Card& other) { return other.id == card.id; });
  const auto entry = present_.find(card.rank);
  if (entry == present_.end() || entry->second.id != card.id) return;
  went_away_[card.rank] = name_of(card);
  present_.erase(entry);
}

Roster Gathering::roster() const {
  LOCKSTEP_CHECK(complete());
  Roster roster;
  auto next = without_rank_.begin();
  for (int rank = 0; rank < world_size_; ++rank) {
    const auto placed = present_.find(rank);
    roster.push_back(placed != present_.end() ? placed->second : *next++);
    roster.back().rank = rank;
    roster.back().world_size = world_size_;
  }
  return roster;
}

Error Gathering::missing() const {
  std::vector<std::string> absent;
  std::vector<std::string> here;
  int first = -1;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (const auto came = present_.find(rank); came != present_.end()) {
      here.push_back(name_of(came->second));
      continue;
    }
    if (first < 0) first = rank;
    const auto gone = went_away_.find(rank);
    absent.push_back(gone == went_away_.end()
                         ? fmt::format("rank {}", rank)
                         : fmt::format("{}, which came and went", gone->second));
  }
  for (const Card& card : without_rank_) here.push_back(name_of(card));
  const std::size_t missing = static_cast<std::size_t>(world_size_) - here.size();
  std::string text =
      fmt::format("{} of {} ranks did not come to the rendezvous in time", missing, world_size_);
  // Who is absent can only be told where all have ranks of their own.
  if (without_rank_.empty()) {
    text += ": " + shortened(std::move(absent));
  } else {
    text += "; here are " + shortened(std::move(here));
    first = -1;
  }
  return Error(ErrorCode::kTimeout, text, first);
}

}  // namespace lockstep
