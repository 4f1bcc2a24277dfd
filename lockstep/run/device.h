#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/comm/communicator.h"
#include "lockstep/train/reducer.h"

namespace lockstep {

// "cpu" or "cuda". With "auto" a GPU if there is one, and otherwise a line that says why not.
std::string choose_device(const std::string& device);

// How the gradients of workers with GPUs meet.
enum class ExchangeChoice : std::uint8_t { kAuto, kHost, kNccl };
std::string_view to_string(ExchangeChoice choice);

// Sets reducer.on_device where gradients are to go from GPU to GPU; with kAuto where they can, and
// otherwise rank 0 says why not. `device` is this rank's GPU, as in ReplicaOptions. Throws
// Error{kInvalidArgument} where what is asked for cannot be. Collective.
void choose_exchange(ExchangeChoice choice, bool gpu, int device, Communicator& communicator,
                     ReducerOptions& reducer);

}  // namespace lockstep
