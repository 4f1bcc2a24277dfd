#include "lockstep/comm/buffer.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace lockstep {

Buffer Buffer::heap(std::size_t bytes) {
  const std::size_t rounded = (bytes + 63) / 64 * 64 + 64;
  auto* data = static_cast<std::byte*>(std::aligned_alloc(64, rounded));
  if (data == nullptr) throw std::bad_alloc();
  std::memset(data, 0, rounded);
  return Buffer(data, bytes, [](std::byte* p) { std::free(p); });
}

}  // namespace lockstep
