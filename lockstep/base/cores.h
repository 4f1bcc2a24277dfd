#pragma once

namespace lockstep {

// Cores this process may run on.
int available_cores();

}  // namespace lockstep
