#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/base/canonical_tree.h"

namespace lockstep {

// Which vectors a reduction combines, and in which order. Rank r brings rows_of[r] *rows*, whole
// vectors; the i-th input of `program` is row sources[i].row of rank sources[i].rank.
struct TreeInputs {
  struct Source {
    int rank;
    std::size_t row;
  };
  std::vector<std::size_t> rows_of;
  std::size_t most_rows = 1;
  std::vector<Source> sources;
  std::vector<CombineStep> program;
  int leaves = 1;

  // Every rank brings one row, which is its leaf of the tree over ranks.
  static TreeInputs ranks(int world_size);
  // Every rank brings the partials of the nodes that it owns.
  static TreeInputs nodes(const LeafOwners& owners, int world_size);
};

}  // namespace lockstep
