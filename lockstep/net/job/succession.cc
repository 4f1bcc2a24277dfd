#include "lockstep/net/job/succession.h"

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

// Between two calls to somebody who does not know the centre yet.
constexpr std::chrono::milliseconds kPause{50};
// In timeouts: the next centre may compute for so long before it notices.
constexpr int kPatience = 10;

}  // namespace

Succession::Succession(const RosterMessage& last, int own_rank, bool may_serve, std::string home,
                       Time now)
    : limit_(now + kPatience * last.timeout),
      timeout_(last.timeout),
      home_(std::move(home)),
      own_rank_(own_rank),
      centre_rank_(last.centre.rank) {
  if (!home_.empty()) return;
  for (const Card& card : last.roster) {
    if (card.rank == centre_rank_) continue;
    if (card.rank == own_rank && !may_serve) continue;
    candidates_.push_back({card.rank, card.mesh_address});
    if (card.rank == own_rank) break;  // nobody behind it is asked
  }
}

Succession::Action Succession::next(Time now) {
  using Kind = Action::Kind;
  if (now >= limit_) return {Kind::kGiveUp};
  if (now < wait_until_) return {Kind::kWait, {}, wait_until_};
  const Time until = std::min(limit_, now + timeout_);
  if (!home_.empty()) return {Kind::kCall, home_, until};
  if (told_) {
    calling_told_ = true;
    return {Kind::kCall, *std::exchange(told_, std::nullopt), until};
  }
  calling_told_ = false;
  if (at_ == candidates_.size()) return {Kind::kGiveUp};
  const Candidate& candidate = candidates_[at_];
  if (candidate.rank != own_rank_) return {Kind::kCall, candidate.address, until};
  Action serve{Kind::kServe};
  if (centre_rank_ >= 0) serve.lost.push_back(centre_rank_);
  for (const Candidate& other : candidates_) {
    if (other.gone) serve.lost.push_back(other.rank);
  }
  std::ranges::sort(serve.lost);
  return serve;
}

void Succession::unreachable(Time now) {
  if (!home_.empty() || calling_told_) {
    wait_until_ = now + kPause;
    return;
  }
  candidates_[at_].gone = true;
  ++at_;
}

void Succession::redirected(const std::string& address, Time now) {
  wait_until_ = now + kPause;
  if (!address.empty()) told_ = address;
}

}  // namespace lockstep
