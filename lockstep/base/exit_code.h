#pragma once

namespace lockstep {

// The exit codes of the command, as docs/architecture.md lists them. A process that a signal
// stopped in order ends with 128 + its number.
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;   // wrong usage
inline constexpr int kExitHalted = 3;  // on values, weights or messages that cannot be right
// Only of the ranks that launch_ranks() starts: failed because another one did.
inline constexpr int kExitEcho = 4;
// Of those, too: left the job in order before its end; 0 is the end.
inline constexpr int kExitLeft = 5;
// Of `lockstep doctor`: nothing will fail, but there are warnings.
inline constexpr int kExitWarnings = 5;

}  // namespace lockstep
