#include "lockstep/model/rotation.h"

#include <cmath>

namespace lockstep {

RotationAngles rotation_angles(const ModelConfig& config, std::size_t positions) {
  const auto half = static_cast<std::size_t>(config.head_dim() / 2);
  RotationAngles angles{std::vector<float>(positions * half), std::vector<float>(positions * half)};
  for (std::size_t i = 0; i < half; ++i) {
    const double exponent = static_cast<double>(2 * i) / static_cast<double>(config.head_dim());
    const auto frequency =
        static_cast<float>(1.0 / std::pow(static_cast<double>(config.rope_theta), exponent));
    for (std::size_t position = 0; position < positions; ++position) {
      const double angle = static_cast<float>(position) * frequency;
      angles.cos[position * half + i] = static_cast<float>(std::cos(angle));
      angles.sin[position * half + i] = static_cast<float>(std::sin(angle));
    }
  }
  return angles;
}

}  // namespace lockstep
