#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "lockstep/train/trainer.h"

namespace lockstep {

// What a worker on a CPU takes, in bytes: weights, moments, accumulators, activations, and with
// `snapshot` the copy of the state that a checkpoint is written from. About, and rather too much.
std::size_t cpu_bytes_needed(const TrainerOptions& options, int rank, int world_size,
                             bool snapshot);

// The same of a worker on a GPU, there.
std::size_t gpu_bytes_needed(const TrainerOptions& options, int rank, int world_size);

// Why the workers `ranks` do not fit a host with so much memory: what is needed, what is available,
// and what would fit; nothing when there is enough. With `saves` rank 0 has a snapshot. Pure.
std::optional<std::string> memory_refusal(const TrainerOptions& options, std::span<const int> ranks,
                                          int world_size, bool saves, std::size_t available);

// The same for a model that is read, and perhaps decodes `context` tokens. Pure.
std::optional<std::string> model_memory_refusal(const ModelConfig& model, int context,
                                                std::size_t available);

// What new processes may take on this host: MemAvailable, or less where a control group has a
// limit. Nothing where the system does not tell.
std::optional<std::size_t> available_memory();
// The number of bytes behind `key` in the text of /proc/meminfo.
std::optional<std::size_t> parse_meminfo(std::string_view text, std::string_view key);

}  // namespace lockstep
