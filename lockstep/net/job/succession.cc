#include "lockstep/net/job/succession.h"

#include <algorithm>
#include <utility>

#include "lockstep/base/index.h"

namespace lockstep {
namespace {

// Between two calls to somebody who does not know the centre yet.
constexpr std::chrono::milliseconds kPause{50};
// Part of the timeout: a centre that somebody is in touch with answers soon, or it has just gone.
constexpr int kToldShare = 5;
// In timeouts: the next centre may compute for so long before it notices.
constexpr int kPatience = 10;

}  // namespace

Succession::Succession(const RosterMessage& last, int own_rank, std::string home, Time now)
    : last_(last),
      own_rank_(own_rank),
      home_(std::move(home)),
      limit_(now + kPatience * last.timeout) {}

Succession::Action Succession::next(bool may_serve, Time now) {
  using Kind = Action::Kind;
  if (now >= limit_) return {Kind::kGiveUp};
  if (now < wait_until_) return {Kind::kWait, {}, wait_until_};
  const Time until = std::min(limit_, now + last_.timeout);
  if (!home_.empty()) return {Kind::kCall, home_, until};
  calling_told_ = told_.has_value();
  if (told_) {
    const Time soon = std::min<Time>(until, now + last_.timeout / kToldShare);
    return {Kind::kCall, *std::exchange(told_, std::nullopt), soon};
  }

  const int centre = last_.centre.rank;
  // Who may not serve was itself lost to the others, so its centre may still be there.
  while (at_ == (may_serve ? centre : own_rank_)) ++at_;
  if (at_ >= static_cast<int>(last_.roster.size())) return {Kind::kGiveUp};
  if (at_ != own_rank_) {
    const Card& card = last_.roster[index_of(at_)];
    return {Kind::kCall, card.mesh_address, until, {}, card.id};
  }
  Action serve{Kind::kServe, {}, {}, gone_};
  if (centre >= 0) serve.lost.push_back(centre);
  std::ranges::sort(serve.lost);
  return serve;
}

void Succession::unreachable(Time now) {
  if (!home_.empty() || calling_told_) {
    wait_until_ = now + kPause;
  } else {
    gone_.push_back(at_++);
  }
}

void Succession::redirected(const std::string& address, Time now) {
  wait_until_ = now + kPause;
  if (!address.empty()) told_ = address;
}

}  // namespace lockstep
