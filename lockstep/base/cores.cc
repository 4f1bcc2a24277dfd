#include "lockstep/base/cores.h"

#include <sched.h>

namespace lockstep {

int available_cores() {
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

}  // namespace lockstep
