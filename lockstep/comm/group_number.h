#pragma once

#include <cstdint>
#include <initializer_list>

namespace lockstep {

// The number of a group that is split from another one. Tells all groups of a job apart: by parent,
// split and first member. Split 0 is that into hosts.
inline std::uint32_t group_number(std::uint32_t parent, std::uint32_t child, int first_member) {
  std::uint32_t group = parent;
  for (const auto word : {child, static_cast<std::uint32_t>(first_member) + 1}) {
    group = (group ^ word) * 0x9e3779b1U;
    group ^= group >> 15;
  }
  return group;
}

}  // namespace lockstep
