#pragma once

#include <cstdint>
#include <span>

#include "lockstep/base/thread_pool.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// Fresh parameters: norms are 1; every other element is normal with mean 0 and deviation 0.02,
// divided by sqrt(2 * layers) for w_o and down, which write to the residual stream. Element i of
// the tensor with place n in layout.tensors() is a function of (seed, n, i) alone.
void initialise(const ParameterLayout& layout, std::uint64_t seed, ThreadPool& pool,
                std::span<float> parameters);

}  // namespace lockstep
