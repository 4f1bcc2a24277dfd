#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/base/canonical_tree.h"

namespace lockstep {

// A value at a node of T(0, lanes): f32 elements and a tail of f64 numbers, both sums over lanes.
struct LaneValue {
  std::vector<float> data;
  std::vector<double> tail;
};

// Adds the values of nodes along T(0, lanes), in whatever order they come: two siblings become
// their parent as soon as both are there. So the bits depend on the tree alone.
class LaneTree {
 public:
  explicit LaneTree(std::uint32_t lanes) : lanes_(lanes) {}

  enum class Outcome : std::uint8_t { kAdded, kNoNode, kOverlaps };
  // All values have the same numbers of elements; kNoNode and kOverlaps change nothing.
  [[nodiscard]] Outcome add(Range node, LaneValue value);

  bool complete() const;
  // The root's value, once complete. The tree is then empty.
  LaneValue take();
  // The first lanes for which nothing has come.
  std::optional<Range> first_gap() const;

 private:
  struct Entry {
    Range node;
    LaneValue value;
  };

  std::uint32_t lanes_;
  std::map<std::size_t, Entry> present_;  // by the node's first lane; disjoint
};

}  // namespace lockstep
