#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "lockstep/model/gpu_model.h"

namespace lockstep {

// Scratch memory that logits and attention share: so much, unless a single row needs more.
constexpr std::size_t kGpuScratch = std::size_t{1700} << 20;

// Rows that bf16 attention takes at a time, a divisor of `rows`: its backward pass keeps a number
// for every pair of tokens of a head, because only then cuDNN's bits are the same every time.
std::size_t attention_rows(std::size_t rows, std::size_t heads, std::size_t context,
                           std::size_t scratch = kGpuScratch);

// About what a model takes on a GPU, libraries included. Never much less than it takes.
std::size_t gpu_bytes_needed(const GpuModelOptions& options);

// One line that says what is needed, what is free, and which settings would fit; nothing when
// there is enough.
std::optional<std::string> gpu_memory_refusal(const GpuModelOptions& options, std::size_t free);

}  // namespace lockstep
