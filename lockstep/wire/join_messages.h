#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/host.h"
#include "lockstep/wire/handshake_messages.h"

namespace lockstep {

// Rendezvous messages; docs/mesh_protocol.md specifies the bytes. Decoders return nothing for bytes
// that are malformed, out of bounds or left over.

inline constexpr int kMaxWorldSize = 16384;
inline constexpr std::uint32_t kMaxCardText = 255;  // each text of a card
inline constexpr std::size_t kMaxJoinBody = 4096;
inline constexpr std::size_t kMaxRosterBody = std::size_t{32} << 20;

// What a member tells about itself when it joins.
struct Card {
  int rank = 0;         // -1 in a join: the centre gives one
  int world_size = 1;   // 0 in a join: as the centre says
  std::string version;  // of the program
  MemberId id{};
  std::int32_t pid = 0;
  HostIdentity host;
  std::string mesh_address;  // "ip:port" of its mesh listener; empty: it has none
  std::string unix_name;     // of its abstract unix listener; may be empty
  std::string fingerprint;   // host_fingerprint()
  std::string cores;         // those it may run on, core_list(); empty: not told

  bool operator==(const Card&) const = default;
};

// All ranks of a job; the card of rank r is at index r.
using Roster = std::vector<Card>;

// "rank 2 (node7, pid 4711)"; without a rank "a rank (node7, pid 4711)"
std::string name_of(const Card& card);

// A member asks to be let in. `patience` is how long it will wait for the others.
struct Join {
  Card card;
  std::chrono::milliseconds patience{};

  bool operator==(const Join&) const = default;
};

// Who serves the rendezvous and is the centre of the job.
struct CentreCard {
  int rank = -1;      // -1: no rank
  std::string title;  // what it is instead: "the coordinator", "the launcher"
  std::string hostname;
  std::int32_t pid = 0;

  bool operator==(const CentreCard&) const = default;
};
// "rank 0 (node1, pid 12)" or "the coordinator (node1, pid 12)"
std::string name_of(const CentreCard& centre);

// The answer to all ranks once they are there.
struct RosterMessage {
  CentreCard centre;
  std::chrono::milliseconds timeout{};  // of the job: silence for so long means dead
  Roster roster;

  bool operator==(const RosterMessage&) const = default;
};

std::vector<std::byte> encode(const Join& join);
std::vector<std::byte> encode(const RosterMessage& message);
std::optional<Join> decode_join(std::span<const std::byte> body);
std::optional<RosterMessage> decode_roster(std::span<const std::byte> body);

}  // namespace lockstep
