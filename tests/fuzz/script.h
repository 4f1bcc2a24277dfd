#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

namespace lockstep::fuzz {

inline void require(bool condition) {
  if (!condition) std::abort();
}

// An input as a script of numbers and bytes; zeros once it has ended.
class Script {
 public:
  Script(const std::uint8_t* data, std::size_t size) : rest_(data, size) {}

  bool ended() const { return rest_.empty(); }
  std::uint8_t byte() {
    if (rest_.empty()) return 0;
    const std::uint8_t first = rest_.front();
    rest_ = rest_.subspan(1);
    return first;
  }
  std::uint64_t number(std::size_t bytes) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i) value |= std::uint64_t{byte()} << (8 * i);
    return value;
  }
  std::vector<std::byte> bytes(std::size_t most) {
    const auto some = std::as_bytes(rest_.first(std::min(most, rest_.size())));
    rest_ = rest_.subspan(some.size());
    return {some.begin(), some.end()};
  }

 private:
  std::span<const std::uint8_t> rest_;
};

}  // namespace lockstep::fuzz
