#include "lockstep/base/processor.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lockstep {

#ifdef __x86_64__

namespace {

bool ask_for_amx_bf16() {
  constexpr unsigned kAmxBf16 = 1u << 22;
  constexpr unsigned kAmxTile = 1u << 24;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  // The tiles enlarge what the kernel saves of a thread, so a process must ask for them.
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

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

bool runs_amx_bf16() {
  static const bool available = ask_for_amx_bf16();
  return available;
}

#else

bool runs_x86_64_v3() { return false; }
bool runs_x86_64_v4() { return false; }
bool runs_amx_bf16() { return false; }

#endif

std::string_view processor_level() {
  return runs_x86_64_v4() ? "x86-64-v4" : runs_x86_64_v3() ? "x86-64-v3" : "generic";
}

}  // namespace lockstep
