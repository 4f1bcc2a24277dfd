#include "lockstep/base/float_buffer.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace lockstep {
namespace {

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kHugePage = 2 << 20;

}  // namespace

FloatBuffer::FloatBuffer(std::size_t size) : size_(size) {
  const std::size_t wanted = size * sizeof(float);
  const std::size_t alignment = wanted < kHugePage ? kCacheLine : kHugePage;
  const std::size_t bytes = (wanted + alignment - 1) / alignment * alignment;
  data_.reset(static_cast<float*>(std::aligned_alloc(alignment, bytes)));
  if (!data_ && bytes > 0) throw std::bad_alloc();
  // Advice: without huge pages everything works, only slower.
  if (alignment == kHugePage) ::madvise(data_.get(), bytes, MADV_HUGEPAGE);
  if (bytes > 0) std::memset(data_.get(), 0, bytes);
}

}  // namespace lockstep
