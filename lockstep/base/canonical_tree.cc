#include "lockstep/base/canonical_tree.h"

#include <algorithm>
#include <bit>

#include "lockstep/base/check.h"

namespace lockstep {
namespace {

void append_maximal(const LeafOwners& owners, Range node, std::vector<Range>& nodes) {
  const auto leaves = std::span(owners).subspan(node.begin, node.size());
  if (std::all_of(leaves.begin(), leaves.end(), [&](int o) { return o == leaves[0]; })) {
    nodes.push_back(node);
    return;
  }
  const std::size_t middle = node.begin + tree_split(node.size());
  append_maximal(owners, {node.begin, middle}, nodes);
  append_maximal(owners, {middle, node.end}, nodes);
}

// Appends the steps that leave the value of `node` on the stack.
void append_steps(std::span<const Range>& nodes, Range node, std::vector<CombineStep>& program) {
  LOCKSTEP_CHECK(!nodes.empty());
  if (nodes.front() == node) {
    nodes = nodes.subspan(1);
    program.push_back({.push = true});
    return;
  }
  LOCKSTEP_CHECK(node.size() > 1);
  const std::size_t middle = node.begin + tree_split(node.size());
  append_steps(nodes, {node.begin, middle}, program);
  append_steps(nodes, {middle, node.end}, program);
  program.push_back({.push = false});
}

}  // namespace

std::size_t tree_split(std::size_t leaves) {
  LOCKSTEP_CHECK(leaves > 1);
  return std::bit_floor(leaves - 1);
}

double tree_sum(std::span<const double> values) {
  if (values.empty()) return 0.0;
  if (values.size() == 1) return values[0];
  const std::size_t split = tree_split(values.size());
  return tree_sum(values.first(split)) + tree_sum(values.subspan(split));
}

LeafOwners even_owners(std::size_t leaves, int world_size) {
  LOCKSTEP_CHECK(world_size > 0);
  LeafOwners owners(leaves);
  const auto run_end = [&](int rank) {
    return static_cast<std::ptrdiff_t>(leaves * static_cast<std::size_t>(rank) /
                                       static_cast<std::size_t>(world_size));
  };
  for (int rank = 0; rank < world_size; ++rank) {
    std::fill(owners.begin() + run_end(rank), owners.begin() + run_end(rank + 1), rank);
  }
  return owners;
}

std::vector<Range> maximal_nodes(const LeafOwners& owners) {
  std::vector<Range> nodes;
  if (owners.empty()) return nodes;
  append_maximal(owners, {0, owners.size()}, nodes);
  return nodes;
}

std::vector<Range> owned_nodes(const LeafOwners& owners, int rank) {
  std::vector<Range> nodes = maximal_nodes(owners);
  std::erase_if(nodes, [&](const Range& node) { return owners[node.begin] != rank; });
  return nodes;
}

std::vector<CombineStep> combine_program(std::span<const Range> nodes, std::size_t leaves) {
  std::vector<CombineStep> program;
  if (leaves == 0) return program;
  program.reserve(2 * nodes.size());
  append_steps(nodes, {0, leaves}, program);
  LOCKSTEP_CHECK(nodes.empty());
  return program;
}

std::size_t stack_depth(std::span<const CombineStep> program) {
  std::size_t depth = 0;
  std::size_t deepest = 0;
  for (const CombineStep step : program) {
    if (step.push) {
      deepest = std::max(deepest, ++depth);
    } else {
      LOCKSTEP_CHECK(depth >= 2);
      --depth;
    }
  }
  return deepest;
}

}  // namespace lockstep
