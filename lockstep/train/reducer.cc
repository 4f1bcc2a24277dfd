#include "lockstep/train/reducer.h"

namespace lockstep {

GradientReducer::GradientReducer(std::uint32_t lanes, std::size_t size, ThreadPool& pool)
    : tree_(schedule_lanes(owned_nodes(even_owners(lanes, 1), 0)), size, pool), tails_(lanes) {}

ReducedStep GradientReducer::finish(Deadline) {  // nobody else to wait for
  return {tree_.partial(0), sum_tails(tails_)};
}

Tail sum_tails(std::span<const Tail> tails) {
  if (tails.empty()) return {};
  if (tails.size() == 1) return tails[0];
  const std::size_t middle = tree_split(static_cast<std::uint32_t>(tails.size()));
  const Tail left = sum_tails(tails.first(middle));
  const Tail right = sum_tails(tails.subspan(middle));
  return {left.loss + right.loss, left.tokens + right.tokens};
}

}  // namespace lockstep
