#pragma once

#include <cstdint>
#include <cstdlib>

namespace lockstep::test {

// Which seeds a test that draws its cases tries: LOCKSTEP_SCHEDULES=N tries so many,
// LOCKSTEP_SEED=S begins with that one.
struct Seeds {
  std::uint64_t first = 1;
  std::uint64_t count;

  explicit Seeds(std::uint64_t usual) : count(usual) {
    if (const char* text = std::getenv("LOCKSTEP_SEED")) first = std::strtoull(text, nullptr, 10);
    if (const char* text = std::getenv("LOCKSTEP_SCHEDULES")) {
      count = std::strtoull(text, nullptr, 10);
    }
  }
  std::uint64_t end() const { return first + count; }
};

}  // namespace lockstep::test
