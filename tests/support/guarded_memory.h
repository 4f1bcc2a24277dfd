#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "lockstep/comm/communicator.h"

namespace lockstep::test {

// Memory between guards: one element off the alignment that allocate() gives, or from allocate()
// itself.
class GuardedMemory {
 public:
  GuardedMemory(Communicator& comm, DataType type, std::size_t count, bool allocated)
      : bytes_(count * size_of(type)), guard_(kGuard + size_of(type)) {
    const std::size_t all = bytes_ + 2 * guard_;
    if (allocated) {
      buffer_ = comm.allocate(all);
      begin_ = buffer_.data();
    } else {
      own_.resize(all);
      begin_ = own_.data();
    }
    std::memset(begin_, static_cast<int>(kUntouched), all);
  }

  std::byte* data() { return begin_ + guard_; }
  std::span<const std::byte> bytes() { return {data(), bytes_}; }
  void fill(std::span<const std::byte> from) {
    if (!from.empty()) std::memcpy(data(), from.data(), from.size());
  }
  bool guards_untouched() const {
    return untouched({begin_, guard_}) && untouched({begin_ + guard_ + bytes_, guard_});
  }
  static bool untouched(std::span<const std::byte> bytes) {
    for (const std::byte b : bytes) {
      if (b != kUntouched) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr std::byte kUntouched{0xa5};

  const std::size_t bytes_;
  const std::size_t guard_;
  Buffer buffer_;
  std::vector<std::byte> own_;
  std::byte* begin_ = nullptr;
};

}  // namespace lockstep::test
