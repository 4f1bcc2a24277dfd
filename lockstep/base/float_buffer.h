#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>

namespace lockstep {

// Heap memory, zeroed, aligned to cache lines; large pieces on huge pages where the system has
// them, which spares kernels with long strides their TLB misses. To be given to std::free. Throws
// std::bad_alloc.
void* allocate_zeroed(std::size_t bytes);
// The same, not zeroed and not touched.
void* allocate_untouched(std::size_t bytes);

// Floats in such memory.
class FloatBuffer {
 public:
  FloatBuffer() = default;
  explicit FloatBuffer(std::size_t size)
      : size_(size), data_(static_cast<float*>(allocate_zeroed(size * sizeof(float)))) {}

  // For a caller that sets every element.
  static FloatBuffer untouched(std::size_t size) {
    FloatBuffer buffer;
    buffer.size_ = size;
    buffer.data_.reset(static_cast<float*>(allocate_untouched(size * sizeof(float))));
    return buffer;
  }

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
