#pragma once

#include <string_view>

namespace lockstep {

// Whether this processor may run what is in *_v3.cc and *_v4.cc, which are compiled for that level
// of x86-64. Never on another architecture.
bool runs_x86_64_v3();
bool runs_x86_64_v4();

// The highest level that it runs: "x86-64-v4", "x86-64-v3" or "generic".
std::string_view processor_level();

// Whether this process may use the matrix unit (AMX) with bf16. The system is asked for it once.
bool runs_amx_bf16();

}  // namespace lockstep
