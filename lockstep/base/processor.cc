#include "lockstep/base/processor.h"

namespace lockstep {

#ifdef __x86_64__

// Every processor with these has the rest of its level, too.
bool runs_x86_64_v3() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

bool runs_x86_64_v4() {
  return runs_x86_64_v3() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#else

bool runs_x86_64_v3() { return false; }
bool runs_x86_64_v4() { return false; }

#endif

}  // namespace lockstep
