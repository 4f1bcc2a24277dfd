#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/host.h"
#include "lockstep/net/job/handshake.h"

namespace lockstep {

// What a rank tells about itself when it joins.
struct Card {
  int rank = 0;
  int world_size = 1;
  std::string version;  // of the program
  MemberId id{};
  std::int32_t pid = 0;
  HostIdentity host;
  std::string mesh_address;  // "ip:port" of its mesh listener
  std::string unix_name;     // of its abstract unix listener; may be empty
  std::string fingerprint;   // host_fingerprint()
  std::string cores;         // those it may run on, core_list(); empty: not told

  bool operator==(const Card&) const = default;
};

// All ranks of a job; the card of rank r is at index r.
using Roster = std::vector<Card>;

inline constexpr int kMaxWorldSize = 16384;

// "rank 2 (node7, pid 4711)"
std::string name_of(const Card& card);

// The peer of a mesh or shared-memory connection must be the process that the roster lists under
// its rank; otherwise Error{kAuthentication}.
void require_member(const Roster& roster, const PeerIdentity& peer);

// Whether the ranks on the host of `roster[rank]` have so many cores to themselves, each.
bool has_cores_for_each(const Roster& roster, int rank, int cores);

// Which ranks differ from rank 0 in what may change floating-point bits; empty if none does.
std::string fingerprint_warning(const Roster& roster);

}  // namespace lockstep
