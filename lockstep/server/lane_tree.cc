#include "lockstep/server/lane_tree.h"

#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {
namespace {

// left += right, as a node of the tree.
void add_right(LaneValue& left, const LaneValue& right) {
  LOCKSTEP_CHECK(left.data.size() == right.data.size() && left.tail.size() == right.tail.size());
  combine(ReduceOp::kSum, DataType::kF32, left.data.data(), left.data.data(), right.data.data(),
          left.data.size());
  combine(ReduceOp::kSum, DataType::kF64, left.tail.data(), left.tail.data(), right.tail.data(),
          left.tail.size());
}

// The parent of a node of T(0, lanes), or nothing for the root; nothing at all if it is no node.
struct TreePlace {
  bool is_node = false;
  Range parent;  // where there is one
  bool is_root = false;
};
TreePlace place_in_tree(Range node, std::size_t lanes) {
  if (node.begin >= node.end || node.end > lanes) return {};
  Range at{0, lanes};
  TreePlace place{.is_node = false, .parent = {}, .is_root = true};
  while (at != node) {
    if (at.size() == 1) return {};
    const std::size_t middle = at.begin + tree_split(at.size());
    place = {.is_node = false, .parent = at, .is_root = false};
    if (node.end <= middle) {
      at.end = middle;
    } else if (node.begin >= middle) {
      at.begin = middle;
    } else {
      return {};
    }
  }
  place.is_node = true;
  return place;
}

}  // namespace

LaneTree::Outcome LaneTree::add(Range node, LaneValue value) {
  TreePlace place = place_in_tree(node, lanes_);
  if (!place.is_node) return Outcome::kNoNode;
  const auto after = present_.lower_bound(node.begin);
  if (after != present_.end() && after->second.node.begin < node.end) return Outcome::kOverlaps;
  if (after != present_.begin() && std::prev(after)->second.node.end > node.begin) {
    return Outcome::kOverlaps;
  }
  while (!place.is_root) {
    const bool is_left = node.begin == place.parent.begin;
    const Range sibling =
        is_left ? Range{node.end, place.parent.end} : Range{place.parent.begin, node.begin};
    const auto found = present_.find(sibling.begin);
    if (found == present_.end() || found->second.node != sibling) break;
    LaneValue other = std::move(found->second.value);
    present_.erase(found);
    if (is_left) {
      add_right(value, other);
    } else {
      add_right(other, value);
      value = std::move(other);
    }
    node = place.parent;
    place = place_in_tree(node, lanes_);
  }
  present_.emplace(node.begin, Entry{node, std::move(value)});
  return Outcome::kAdded;
}

bool LaneTree::complete() const {
  return present_.size() == 1 && present_.begin()->second.node == Range{0, lanes_};
}

LaneValue LaneTree::take() {
  LOCKSTEP_CHECK(complete());
  LaneValue value = std::move(present_.begin()->second.value);
  present_.clear();
  return value;
}

std::optional<Range> LaneTree::first_gap() const {
  std::size_t at = 0;
  for (const auto& [begin, entry] : present_) {
    if (begin > at) return Range{at, begin};
    at = entry.node.end;
  }
  if (at < lanes_) return Range{at, lanes_};
  return std::nullopt;
}

}  // namespace lockstep
