#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep {

// Messages on the links between the ranks and the centre; docs/mesh_protocol.md specifies the
// bytes. `generation` is the tag of the generation that a message is about (tag_of), so that nobody
// acts on what was said about another. Ping carries nothing; a verdict is an error (wire_error.h)
// and ends the job.

inline constexpr std::uint32_t kMaxGroups = 64;        // in one message; the rest is left out
inline constexpr std::uint32_t kMaxDescription = 512;  // longer ones are cut
inline constexpr std::size_t kMaxControlBody = 65536;

// A collective that a rank has entered, as it tells the centre.
struct Progress {
  std::uint32_t group = 0;      // which communicator
  std::uint64_t sequence = 0;   // how many collectives it has entered there
  bool inside = false;          // still in that collective, or done with it
  std::string description;      // "all_reduce sum f32 x 1000 (tree)"
  std::int32_t waits_for = -1;  // inside: the rank of the job it has been waiting for, if any

  bool operator==(const Progress&) const = default;
};

// A heartbeat, or the goodbye of a member that leaves. The centre's have no progress.
struct Pulse {
  std::uint32_t generation = 0;
  std::vector<Progress> progress = {};

  bool operator==(const Pulse&) const = default;
};

// A failure as one rank saw it. error.rank() is the rank it suspects; -1 or its own: itself.
struct Report {
  Error error;
  std::vector<Progress> progress = {};
  std::uint32_t generation = 0;
};

// The centre ends a generation, because of a member that is lost; the job goes on with another.
struct GenerationEnd {
  std::uint32_t generation = 0;
  Error error;
};

// What the centre wants of a rank, which passes it on to all. The last one that came counts, but
// for one whose signal is kWriteFlight: that goes to every rank and changes no other.
inline constexpr std::uint32_t kWriteFlight = 12;  // SIGUSR2
// A request counts once, however often it is told: each has another number than the one before.
inline constexpr std::uint32_t kMostSaveRequest = INT32_MAX;
// To a prepared newcomer: there is no lane for it, it is to wait until a member goes.
inline constexpr std::uint32_t kSpare = 10;
struct Wish {
  std::uint32_t stop = 0;  // a signal's number: end the run in order
  std::uint32_t save = 0;  // the newest request to save a checkpoint, by its number; 0: none
  bool regroup = false;    // newcomers wait

  bool operator==(const Wish&) const = default;
};

std::vector<std::byte> encode(const Pulse& pulse);
std::vector<std::byte> encode(const Report& report);
std::vector<std::byte> encode(const GenerationEnd& end);
std::vector<std::byte> encode(const Wish& wish);
std::optional<Pulse> decode_pulse(std::span<const std::byte> body);
std::optional<Report> decode_report(std::span<const std::byte> body);
std::optional<GenerationEnd> decode_generation_end(std::span<const std::byte> body);
std::optional<Wish> decode_wish(std::span<const std::byte> body);

// Ready and go: the tag alone.
std::vector<std::byte> encode_tag(std::uint32_t generation);
std::optional<std::uint32_t> decode_tag(std::span<const std::byte> body);

// A redirection: where the centre is, "ip:port"; empty where that is not known now.
std::vector<std::byte> encode_redirect(std::string_view address);
std::optional<std::string> decode_redirect(std::span<const std::byte> body);

}  // namespace lockstep
