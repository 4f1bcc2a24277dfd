#pragma once

#include <cstddef>

namespace lockstep {

// [begin, end): elements of a buffer, or leaves of a tree.
struct Range {
  std::size_t begin = 0;
  std::size_t end = 0;

  constexpr std::size_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

}  // namespace lockstep
