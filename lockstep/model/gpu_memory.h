#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "lockstep/model/gpu_model.h"

namespace lockstep {

// About what a model takes on a GPU, libraries included. Never much less than it takes.
std::size_t gpu_bytes_needed(const GpuModelOptions& options);

// One line that says what is needed, what is free, and which settings would fit; nothing when
// there is enough.
std::optional<std::string> gpu_memory_refusal(const GpuModelOptions& options, std::size_t free);

}  // namespace lockstep
