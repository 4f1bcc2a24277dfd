#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "lockstep/base/range.h"

namespace lockstep {

// The canonical tree T(a, b) over leaves a..b-1: a leaf if b - a = 1, otherwise
// T(a, a + p) + T(a + p, b), p the largest power of two strictly below b - a.
// Every exact reduction in Lockstep, over ranks or over lanes, adds in this order. A node of the
// tree is the Range of its leaves.

// Where a node of `leaves` > 1 leaves is cut: the largest power of two strictly below `leaves`.
std::size_t tree_split(std::size_t leaves);

// T(0, n) of plain numbers; 0 for none.
double tree_sum(std::span<const double> values);

// Who owns each leaf; leaf i belongs to rank owner[i].
using LeafOwners = std::vector<int>;

// Contiguous runs: rank r of `world_size` owns [r * leaves / world_size, (r + 1) * leaves /
// world_size).
LeafOwners even_owners(std::size_t leaves, int world_size);

// The maximal nodes of T(0, owners.size()) all of whose leaves belong to one rank, in leaf order;
// `owned_nodes` keeps those of one rank.
std::vector<Range> maximal_nodes(const LeafOwners& owners);
std::vector<Range> owned_nodes(const LeafOwners& owners, int rank);

// How to combine the values of `nodes` (as maximal_nodes gives them, in that order) along the tree.
// A stack program: every step pops `right`, then `left`, and pushes left + right; `push` steps push
// the next node's value.
struct CombineStep {
  bool push = false;  // else: combine the two on top
  bool operator==(const CombineStep&) const = default;
};
std::vector<CombineStep> combine_program(std::span<const Range> nodes, std::size_t leaves);
// The largest number of values on the stack at once.
std::size_t stack_depth(std::span<const CombineStep> program);

}  // namespace lockstep
