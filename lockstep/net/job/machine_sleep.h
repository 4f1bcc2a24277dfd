#pragma once

#include "lockstep/base/deadline.h"

namespace lockstep {

// How long the machine was suspended. The steady clock stands still meanwhile, so that nobody would
// notice who judges by it. One thread.
class MachineSleep {
 public:
  MachineSleep();
  // Since the last call.
  Deadline::Clock::duration take();

 private:
  Deadline::Clock::duration before_;  // from the boot on
};

}  // namespace lockstep
