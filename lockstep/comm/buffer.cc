#include "lockstep/comm/buffer.h"

#include <cstdlib>

#include "lockstep/base/float_buffer.h"

namespace lockstep {

Buffer Buffer::heap(std::size_t bytes) {
  // At least a line, so that an empty buffer has an address too.
  auto* data = static_cast<std::byte*>(allocate_zeroed(bytes + 64));
  return Buffer(data, bytes, [](std::byte* memory) { std::free(memory); });
}

}  // namespace lockstep
