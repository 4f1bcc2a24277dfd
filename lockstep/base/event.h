#pragma once

#include "lockstep/base/descriptor.h"

namespace lockstep {

// Wakes a thread that sleeps in poll(): its descriptor is readable from set() until clear().
// Thread-safe. The constructor throws Error{kIo}.
class Event {
 public:
  Event();

  int fd() const { return descriptor_.get(); }
  void set() const;
  void clear() const;

 private:
  Descriptor descriptor_;
};

}  // namespace lockstep
