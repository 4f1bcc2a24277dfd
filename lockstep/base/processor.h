#pragma once

namespace lockstep {

// Whether this processor may run what is in *_v3.cc and *_v4.cc, which are compiled for that level
// of x86-64. Never on another architecture.
bool runs_x86_64_v3();
bool runs_x86_64_v4();

}  // namespace lockstep
