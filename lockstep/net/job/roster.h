#pragma once

#include <string>

#include "lockstep/net/job/handshake.h"
#include "lockstep/wire/join_messages.h"

namespace lockstep {

// Whether the peer is the process that the roster lists under its rank.
bool is_member(const Roster& roster, const PeerIdentity& peer);

// Whether the ranks on the host of `roster[rank]` have so many cores to themselves, each.
bool has_cores_for_each(const Roster& roster, int rank, int cores);

// Which ranks differ from rank 0 in what may change floating-point bits; empty if none does.
std::string fingerprint_warning(const Roster& roster);

}  // namespace lockstep
