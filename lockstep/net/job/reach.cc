#include "lockstep/net/job/reach.h"

#include <fmt/format.h>

#include "lockstep/base/host.h"
#include "lockstep/net/socket/address.h"

namespace lockstep {
namespace {

bool listens_on_loopback(const Card& card) {
  const auto address = SocketAddress::parse(card.mesh_address);
  return address && address->is_loopback();  // no address: nobody calls it
}

Error out_of_reach(const Card& card, const Card& far) {
  return Error(ErrorCode::kNoConnection,
               fmt::format("{} listens on {}, which {} on another host cannot reach; choose its "
                           "network with --interface",
                           name_of(card), card.mesh_address, name_of(far)),
               card.rank);
}

}  // namespace

std::optional<Error> Reach::conflict(const Card& card) const {
  const bool far_from_first = first_ && !same_host(card.host, first_->host);
  const auto& far = far_from_first ? first_ : elsewhere_;
  if (!far) return std::nullopt;
  // All that were added are on one host then.
  if (loopback_) return out_of_reach(*loopback_, card);
  if (listens_on_loopback(card)) return out_of_reach(card, *far);
  return std::nullopt;
}

void Reach::add(const Card& card) {
  if (!first_) {
    first_ = card;
  } else if (!elsewhere_ && !same_host(card.host, first_->host)) {
    elsewhere_ = card;
  }
  if (!loopback_ && listens_on_loopback(card)) loopback_ = card;
}

std::optional<Error> check_reachable(const Roster& roster) {
  Reach reach;
  for (const Card& card : roster) {
    if (const auto error = reach.conflict(card)) return error;
    reach.add(card);
  }
  return std::nullopt;
}

}  // namespace lockstep
