#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "lockstep/wire/mesh_frame.h"

namespace lockstep {

// The numbers ahead of the tail of every round that a ServerEngine runs. The server adds them like
// any others; their sums tell whether the job ends, and whether all ranks are in the same call.
class RoundControl {
 public:
  // Whether this is the job's last round. It is the tail's first number (docs/wire_protocol.md).
  static constexpr std::size_t kLast = 0;
  static constexpr std::size_t kNumbers = 8;

  RoundControl(const MeshFrame& stamp, bool last);

  // What this rank brings, once per round.
  const std::array<double, kNumbers>& numbers() const { return numbers_; }
  // Whether all ranks that brought theirs have the stamp of this one.
  bool agrees(std::span<const double> sums) const;

 private:
  std::array<double, kNumbers> numbers_{};
};

}  // namespace lockstep
