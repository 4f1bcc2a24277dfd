#pragma once

#include <cstddef>
#include <vector>

#include "lockstep/model/config.h"

namespace lockstep {

// Cosines and sines of the rotary embedding, a row of head_dim / 2 per position. The angles are
// rounded to f32 as Hugging Face's implementation does.
struct RotationAngles {
  std::vector<float> cos, sin;
};
RotationAngles rotation_angles(const ModelConfig& config, std::size_t positions);

}  // namespace lockstep
