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

// Names a generation of a job. The number counts them; the id is made up by the centre that forms
// it, so that rival centres never form the same one. Number 0: none.
struct GenerationName {
  std::uint32_t number = 0;
  MemberId id{};

  bool operator==(const GenerationName&) const = default;
};
// A hash of both, which handshakes and frames of the generation carry; 0 for none.
std::uint32_t tag_of(const GenerationName& generation);

// Where a member stands that asks to be let in.
enum class Standing : std::uint8_t {
  kNew,       // it knows nothing of the job, which may not have begun
  kPrepared,  // it has what a welcome told it, and can enter at a boundary between steps
  kBoundary,  // its last generation ends in order, as all its members know
  kBroken,    // its last generation failed
  kWaits,     // as kBoundary, but it has saved its work and waits for more workers
  kEnters,    // it was let in, and that generation ended before it had begun
};

// A member asks to be let in, or to be in the next generation.
struct Join {
  Card card;
  std::chrono::milliseconds patience{};  // how long it will wait for the others
  Standing standing = Standing::kNew;
  bool survives = false;          // it goes on without members that are lost, if all say so
  std::uint32_t min_workers = 1;  // fewer do not go on
  GenerationName last = {};       // where it comes from
  std::int64_t step = 0;          // steps that it has done

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

// A member of the generation before that is not in the next one, and why.
struct Departure {
  enum class Kind : std::uint8_t {
    kDied,      // its process ended
    kFailed,    // by its own fault, as it said, or as its launcher saw
    kExpelled,  // it was silent, stuck or out of reach
    kLeft,      // in good order
  };
  int rank = 0;  // in the generation before
  Kind kind{};
  std::string name;
  std::string why;  // cut at kMaxWhy

  bool operator==(const Departure&) const = default;
};
inline constexpr std::uint32_t kMaxWhy = 512;

// The answer to all ranks once they are there: a generation begins.
struct RosterMessage {
  CentreCard centre;
  std::chrono::milliseconds timeout{};  // of the job: silence for so long means dead
  GenerationName generation = {};
  bool survives = false;        // the job goes on without members that are lost
  bool too_few = false;         // to go on: they are to save their work and wait for others
  std::uint32_t newcomers = 0;  // these last ranks were in no generation that has begun
  std::int64_t step = 0;        // the most steps that a member has done
  std::vector<Departure> departed = {};  // ascending
  Roster roster;

  bool operator==(const RosterMessage&) const = default;
};

// The same for members of the generation before, as the difference from its roster.
struct RosterChange {
  GenerationName base = {};  // which roster
  CentreCard centre;
  GenerationName generation = {};
  bool too_few = false;
  std::uint32_t newcomers = 0;
  std::int64_t step = 0;
  std::vector<Departure> departed;  // ascending
  Roster added;                     // they get the ranks behind those that are left

  bool operator==(const RosterChange&) const = default;
};
// Nothing if the change is not one of that roster.
std::optional<RosterMessage> changed(const RosterMessage& before, const RosterChange& change);

// What a rank tells the centre of the job, for those who come later.
struct Description {
  std::uint32_t most_workers = 0;   // more have nothing to do; 0: any number has
  std::vector<std::byte> contents;  // opaque here

  bool operator==(const Description&) const = default;
};
inline constexpr std::size_t kMaxJobDescription = std::size_t{31} << 20;

std::vector<std::byte> encode(const Join& join);
std::vector<std::byte> encode(const RosterMessage& message);
std::vector<std::byte> encode(const RosterChange& change);
std::vector<std::byte> encode(const Description& description);
std::optional<Join> decode_join(std::span<const std::byte> body);
std::optional<RosterMessage> decode_roster(std::span<const std::byte> body);
std::optional<RosterChange> decode_roster_change(std::span<const std::byte> body);
std::optional<Description> decode_description(std::span<const std::byte> body);

}  // namespace lockstep
