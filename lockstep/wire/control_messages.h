#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/net/job/supervisor.h"

namespace lockstep {

// Messages on the links between the ranks and the centre; docs/mesh_protocol.md specifies the
// bytes. Heartbeat and goodbye carry progress, or nothing when the centre sends them; ping carries
// nothing; a verdict is an error (wire_error.h).

inline constexpr std::uint32_t kMaxGroups = 64;        // in one message; the rest is left out
inline constexpr std::uint32_t kMaxDescription = 512;  // longer ones are cut
inline constexpr std::size_t kMaxControlBody = 65536;

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
