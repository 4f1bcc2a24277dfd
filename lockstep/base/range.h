#pragma once

#include <algorithm>
#include <cstddef>

namespace lockstep {

// [begin, end): elements of a vector, or leaves of a tree.
struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;

  constexpr std::size_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

// What two ranges have in common; empty, and within `b`, if they have nothing.
constexpr Range common_part(Range a, Range b) {
  const std::size_t begin = std::clamp(a.begin, b.begin, b.end);
  return {begin, std::clamp(a.end, begin, b.end)};
}

}  // namespace lockstep
