#pragma once

#include <cstdint>

#include "lockstep/comm/call.h"

namespace lockstep {

// Which ranks of a group share memory.
enum class Sharing : std::uint8_t {
  kNone,
  kHosts,  // those of a host: there are several hosts, one of them with several ranks
  kAll,
};

// Whether calls of this kind can use `algorithm` in such a group.
bool offers(Collective collective, Algorithm algorithm, Sharing sharing);

// The caller's choice if there is one, otherwise by size, world size and whether the ranks share
// cores (Transport::crowded). Throws Error{kInvalidArgument} for a choice that is not offered.
Algorithm choose_algorithm(const Call& call, int world_size, Sharing sharing, bool crowded);

}  // namespace lockstep
