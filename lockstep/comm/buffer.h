#pragma once

#include <cstddef>
#include <cstring>
#include <functional>
#include <utility>

#include "lockstep/comm/types.h"

namespace lockstep {

// Owns memory for collectives, 64-byte aligned and zero-filled. Where ranks share memory, a buffer
// of Communicator::allocate() lies where the other ranks read and write it in place, which saves
// two copies. Move-only. Must be destroyed before its communicator.
class Buffer {
 public:
  using Release = std::function<void(std::byte*)>;

  Buffer() = default;
  Buffer(std::byte* data, std::size_t bytes, Release release)
      : data_(data), bytes_(bytes), release_(std::move(release)) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) release_(data_);
  }

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  template <typename T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(data_), bytes_ / sizeof(T)};
  }

  // Ordinary memory of this process.
  static Buffer heap(std::size_t bytes);

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(release_, other.release_);
  }

  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  Release release_;
};

// Copies memory; `to` and `from` may overlap, or be the same.
inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memmove(to, from, bytes);
}

}  // namespace lockstep
