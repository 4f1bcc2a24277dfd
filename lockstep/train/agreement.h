#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// What workers compare with each other. All calls are collective. A difference throws the same
// error on every rank, which names the ranks.

// The texts of all ranks, by rank. They may differ in length.
std::vector<std::string> gather_texts(Communicator& communicator, std::string_view own);

struct Setting {
  std::string name;
  std::string value;
  // False: a difference is only a warning, because the bits of the result may depend on it.
  bool required = true;
};
// Throws Error{kInvalidArgument} when a required setting differs, or the lists have different
// names.
void compare_settings(Communicator& communicator, std::span<const Setting> own);

// Compares the weights of all ranks by the hashes of their tensors. Throws Error{kReplicaMismatch}
// that names the rank which differs from the majority (from rank 0 where there is none), and the
// first tensor that differs.
void compare_replicas(Communicator& communicator, const ParameterLayout& layout,
                      std::span<const Blake3Hash> tensors, std::int64_t step);

}  // namespace lockstep
