#pragma once

#include <span>
#include <string>

#include "lockstep/model/layout.h"

namespace lockstep {

// "blake3:<64 hex digits>": the BLAKE3 of the concatenated BLAKE3s of the tensors, in the order of
// layout.tensors(), each hashed as row-major little-endian f32.
std::string weights_hash(const ParameterLayout& layout, std::span<const float> parameters);

}  // namespace lockstep
