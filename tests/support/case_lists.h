#pragma once

#include <vector>

#include "lockstep/comm/collectives/algorithm_table.h"
#include "tests/support/collective_case.h"
#include "tests/support/groups.h"

namespace lockstep::test {

inline constexpr int kWorldSizes[] = {1, 2, 3, 4, 5, 7, 8, 16};

// Everything that a group of this size can be asked for, cases with the same data together:
// every collective, type, operation, algorithm that ranks which share memory so have, and root,
// even and uneven shares, and these counts: 0, 1, n - 1, n, n + 1, 7, 100 000, several segments
// + 1.
std::vector<Case> reduction_cases(int world_size, Sharing sharing);
std::vector<Case> move_cases(int world_size, Sharing sharing);
// Reductions over nodes: world_size up to five times as many lanes plus three.
std::vector<Case> node_cases(int world_size, Sharing sharing);

// Some 400 of all cases over all world sizes: every two values of two properties occur together,
// and so do most combinations of a collective and two other properties.
std::vector<Case> covering_cases(Sharing sharing);

// Runs the cases, all of the same world size, in their order. Throws at the first failure.
void run_cases(Group& group, std::span<const Case> cases);

}  // namespace lockstep::test
