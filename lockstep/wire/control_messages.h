#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep {

// Messages on the links between the ranks and the centre; docs/mesh_protocol.md specifies the
// bytes. Heartbeat and goodbye carry progress, or nothing when the centre sends them; ping carries
// nothing; a verdict is an error (wire_error.h).

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

// A failure as one rank saw it. error.rank() is the rank it suspects; -1 or its own: itself.
struct Report {
  Error error;
  std::vector<Progress> progress;
};

std::vector<std::byte> encode(const std::vector<Progress>& progress);
std::vector<std::byte> encode(const Report& report);
std::optional<std::vector<Progress>> decode_progress(std::span<const std::byte> body);
std::optional<Report> decode_report(std::span<const std::byte> body);

}  // namespace lockstep
