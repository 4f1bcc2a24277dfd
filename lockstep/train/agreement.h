#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// What workers compare with each other. All calls are collective. A difference ends in the same
// error on every rank, which names the ranks.

// Everybody's text, by rank; they may differ in length.
std::vector<std::string> gather_texts(Communicator& communicator, std::string_view own);

struct Setting {
  std::string name;
  std::string value;
  // Otherwise a difference is worth a warning only: the bits of the result may depend on it.
  bool required = true;
};
// The first line that says who differs in what, of what all ranks told; empty if they agree.
// `warnings` gets the differences that are allowed. Pure.
std::string find_difference(std::span<const std::vector<Setting>> by_rank,
                            std::vector<std::string>& warnings);
// Throws Error{kInvalidArgument}. The same names in the same order on every rank, or that is the
// difference.
void compare_settings(Communicator& communicator, std::span<const Setting> own);

// Whether all ranks have the same weights, given the hashes of their tensors. Throws
// Error{kReplicaMismatch} that names the rank which differs from most (rank 0 where there is no
// majority), and the first tensor.
void compare_replicas(Communicator& communicator, const ParameterLayout& layout,
                      std::span<const Blake3Hash> tensors, std::int64_t step);

}  // namespace lockstep
