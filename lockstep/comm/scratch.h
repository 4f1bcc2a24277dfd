#pragma once

#include "lockstep/comm/buffer.h"

namespace lockstep {

// Memory for what an engine works on. It grows to the largest size asked for and is kept, so that a
// collective that is repeated allocates nothing. What it held is lost with the next get().
class Scratch {
 public:
  std::byte* get(std::size_t bytes) {
    if (buffer_.bytes() < bytes) buffer_ = Buffer::heap(bytes);
    return buffer_.data();
  }

 private:
  Buffer buffer_;
};

}  // namespace lockstep
