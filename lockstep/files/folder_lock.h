#pragma once

#include <chrono>
#include <string>

#include "lockstep/base/deadline.h"
#include "lockstep/base/descriptor.h"

namespace lockstep {

// Keeps other processes that ask for it out of a folder, until it goes or the process ends.
// File systems that know no locks are used without one.
class FolderLock {
 public:
  // A process that was killed a moment ago may still be ending.
  static constexpr std::chrono::seconds kPatience{5};

  // Creates the folder where it is missing. Throws Error{kInvalidArgument} with the process that
  // has the lock when it still has it at the deadline, Error{kIo} when there can be no folder.
  explicit FolderLock(const std::string& folder, Deadline deadline = Deadline::after(kPatience));

 private:
  Descriptor folder_;
};

}  // namespace lockstep
