#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/base/canonical_tree.h"

namespace lockstep {

// Which vectors a reduction combines, and in which order. Rank r brings partials_of[r]
// partials, whole vectors; the i-th input of `program` is partial sources[i].partial of rank
// sources[i].rank.
struct TreeInputs {
  struct Source {
    int rank;
    std::size_t partial;
  };
  std::vector<std::size_t> partials_of;
  std::size_t most_partials = 1;
  std::vector<Source> sources;
  std::vector<CombineStep> program;
  int leaves = 1;

  // Every rank brings one partial, which is its leaf of the tree over ranks.
  static TreeInputs ranks(int world_size);
  // Every rank brings the partials of the nodes that it owns.
  static TreeInputs nodes(const LeafOwners& owners, int world_size);
};

}  // namespace lockstep
