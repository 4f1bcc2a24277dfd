#pragma once

#include <string>

#include "lockstep/net/job/handshake.h"
#include "lockstep/wire/join_messages.h"

namespace lockstep {

// Whether the peer is the process that the roster lists under its rank.
bool is_member(const Roster& roster, const PeerIdentity& peer);

// How many cores each rank on the host of `roster[rank]` has to itself; 0 where they are too few.
int cores_for_each(const Roster& roster, int rank);
// The same where they have the fewest.
int least_cores_for_each(const Roster& roster);

// Which ranks differ from rank 0 in what may change floating-point bits; empty if none does.
std::string fingerprint_warning(const Roster& roster);

}  // namespace lockstep
