#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace lockstep {

// The header ahead of every message between two ranks, the sender's *stamp*: which collective it
// belongs to, as the sender sees it, and how many bytes follow. A receiver compares it with its own
// view, so that a disagreement is an error and never a silent mix. docs/mesh_protocol.md specifies
// the bytes.
struct MeshFrame {
  std::uint8_t kind = 0;       // comm's Collective
  std::uint8_t type = 0;       // comm's DataType
  std::uint8_t op = 0;         // comm's ReduceOp
  std::uint8_t algorithm = 0;  // comm's Algorithm
  std::uint32_t generation = 0;
  std::uint32_t group = 0;     // the communicator's number within the generation
  std::uint64_t sequence = 0;  // n-th collective of the group
  std::uint64_t count = 0;     // elements, as called
  std::uint64_t shape = 0;     // root, and a hash of uneven counts or of lane ownership
  std::uint32_t step = 0;
  std::uint32_t bucket = 0;
  std::uint32_t part =
      0;  // n-th message of the collective on this link; not compared with the caller's
  std::uint64_t payload = 0;  // bytes that follow

  bool operator==(const MeshFrame&) const = default;
};

inline constexpr std::size_t kMeshFrameBytes = 64;
using MeshFrameBytes = std::array<std::byte, kMeshFrameBytes>;

MeshFrameBytes encode(const MeshFrame& frame);
// Nothing if magic, version or checksum are wrong.
std::optional<MeshFrame> decode_mesh_frame(std::span<const std::byte, kMeshFrameBytes> bytes);

// What ranks in the same collective agree on, in few bytes: of all fields but part and payload.
std::uint64_t call_digest(const MeshFrame& stamp);

}  // namespace lockstep
