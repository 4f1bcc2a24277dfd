#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/base/random.h"

namespace lockstep::test {

// Numbers in [-scale, scale), the same for the same seed.
inline std::vector<float> noise(std::size_t count, std::uint64_t seed, float scale = 1.0f) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = (2.0f * random_f32(seed, 77, i) - 1.0f) * scale;
  }
  return values;
}

inline std::vector<double> widened(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

// A function of f64 numbers, written as plainly as possible.
using Function = std::function<double(const std::vector<double>&)>;

// Compares `gradient` with central differences of `function` at `at`: at up to `places` places
// spread over the vector, and along one direction through all of them.
inline void expect_gradient(const std::string& what, const Function& function,
                            const std::vector<float>& at, const std::vector<float>& gradient,
                            double tolerance, std::size_t places = 60) {
  ASSERT_EQ(at.size(), gradient.size()) << what;
  constexpr double kStep = 1e-4;
  const std::vector<double> x = widened(at);
  const auto slope = [&](const std::vector<double>& direction) {
    std::vector<double> ahead = x, behind = x;
    for (std::size_t i = 0; i < x.size(); ++i) {
      ahead[i] += kStep * direction[i];
      behind[i] -= kStep * direction[i];
    }
    return (function(ahead) - function(behind)) / (2 * kStep);
  };
  double size = 0.0;  // what a typical element of the gradient is
  for (const float g : gradient) size += static_cast<double>(g) * static_cast<double>(g);
  size = std::sqrt(size / static_cast<double>(gradient.size()));
  ASSERT_GT(size, 0.0) << what << ": a gradient of zeros proves nothing";

  const std::size_t stride = std::max<std::size_t>(1, at.size() / places);
  for (std::size_t i = 0; i < at.size(); i += stride) {
    std::vector<double> direction(at.size(), 0.0);
    direction[i] = 1.0;
    EXPECT_NEAR(static_cast<double>(gradient[i]), slope(direction), tolerance * size)
        << what << ", element " << i;
  }
  const std::vector<double> direction = widened(noise(at.size(), 4711));
  double along = 0.0;
  for (std::size_t i = 0; i < at.size(); ++i) along += gradient[i] * direction[i];
  EXPECT_NEAR(along, slope(direction), tolerance * size * std::sqrt(static_cast<double>(at.size())))
      << what << ", all elements";
}

}  // namespace lockstep::test
