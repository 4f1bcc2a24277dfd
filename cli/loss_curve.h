#pragma once

#include <string>

#include "cli/step_timing.h"

namespace lockstep::cli {

// Trains on the tokens of a file (16 bits each, little-endian), `tokens()` of the bench a step and
// one after the other, and prints a JSON object with the loss of each step, and one with the hash
// of the weights at the end. The learning rate grows over the first `warmup` steps. Throws
// Error{kIo} when the file has too few tokens.
void print_loss_curve(StepBench& bench, const std::string& path, int steps, int warmup);

}  // namespace lockstep::cli
