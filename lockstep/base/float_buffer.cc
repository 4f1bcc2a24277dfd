#include "lockstep/base/float_buffer.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace lockstep {
namespace {

constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kHugePage = 2 << 20;

}  // namespace

void* allocate_untouched(std::size_t bytes) {
  const std::size_t alignment = bytes < kHugePage ? kCacheLine : kHugePage;
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* data = std::aligned_alloc(alignment, rounded);
  if (data == nullptr && rounded > 0) throw std::bad_alloc();
  // Advice: without huge pages everything works, only slower.
  if (alignment == kHugePage) ::madvise(data, rounded, MADV_HUGEPAGE);
  return data;
}

void* allocate_zeroed(std::size_t bytes) {
  void* data = allocate_untouched(bytes);
  if (bytes > 0) std::memset(data, 0, bytes);
  return data;
}

}  // namespace lockstep
