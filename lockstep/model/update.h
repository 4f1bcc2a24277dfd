#pragma once

#include <cstdint>
#include <optional>

namespace lockstep {

// One step of the optimizer: the sum of token gradients becomes a mean, is clipped, and AdamW takes
// it. Nothing is changed when the norm or a loss of the step is not finite, or there are no tokens.
struct UpdateRequest {
  std::int64_t tokens = 0;  // of all workers
  double clip = 0;          // longest gradient; 0: any
  double learning_rate = 0;
  std::int64_t step = 0;            // from 0
  std::optional<double> norm = {};  // of the sum, where it is known already
};

struct UpdateResult {
  double norm = 0;  // of the sum, before clipping
  bool done = false;
};

}  // namespace lockstep
