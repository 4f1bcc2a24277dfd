#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>

namespace lockstep {

// Floats on the heap: zeroed, aligned to cache lines; large ones on huge pages where the system has
// them, which spares kernels with long strides their TLB misses.
class FloatBuffer {
 public:
  FloatBuffer() = default;
  explicit FloatBuffer(std::size_t size);

  float* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  std::span<float> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(float* data) const { std::free(data); }
  };

  std::size_t size_ = 0;
  std::unique_ptr<float, Free> data_;
};

}  // namespace lockstep
