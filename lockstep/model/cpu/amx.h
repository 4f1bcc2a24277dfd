#pragma once

namespace lockstep {

// Whether this process may use the matrix unit (AMX) with bf16. The system is asked for it once.
bool amx_bf16_available();

}  // namespace lockstep
