#include "lockstep/comm/tree_inputs.h"

#include <algorithm>

#include "lockstep/base/index.h"

namespace lockstep {

TreeInputs TreeInputs::ranks(int world_size) {
  return nodes(even_owners(index_of(world_size), world_size), world_size);
}

TreeInputs TreeInputs::nodes(const LeafOwners& owners, int world_size) {
  TreeInputs inputs;
  inputs.partials_of.assign(static_cast<std::size_t>(world_size), 0);
  const std::vector<Range> all = maximal_nodes(owners);
  for (const Range& node : all) {
    const int owner = owners[node.begin];
    inputs.sources.push_back({owner, inputs.partials_of[index_of(owner)]++});
  }
  inputs.most_partials = *std::max_element(inputs.partials_of.begin(), inputs.partials_of.end());
  inputs.program = combine_program(all, owners.size());
  inputs.leaves = static_cast<int>(owners.size());
  return inputs;
}

}  // namespace lockstep
