#include "lockstep/model/init.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "lockstep/base/check.h"
#include "lockstep/base/random.h"

namespace lockstep {
namespace {

constexpr std::uint32_t kInitStream = 0x696e6974;  // "init": apart from the streams of the data
constexpr std::size_t kElementsPerTask = 16384;
constexpr double kDeviation = 0.02;

// Two independent normal numbers (Box and Muller). The first argument of log is never 0.
std::array<double, 2> normal_pair(std::uint32_t a, std::uint32_t b) {
  const double radius = std::sqrt(-2.0 * std::log((a + 0.5) * 0x1p-32));
  const double angle = 2.0 * std::numbers::pi * (b * 0x1p-32);
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

// Elements [begin, end) of the tensor, `begin` a multiple of 4.
void fill_normal(std::uint64_t seed, std::uint32_t place, double deviation, std::size_t begin,
                 std::size_t end, float* out) {
  const std::array<std::uint32_t, 2> key = {static_cast<std::uint32_t>(seed),
                                            static_cast<std::uint32_t>(seed >> 32)};
  for (std::size_t i = begin; i < end; i += 4) {
    const std::uint64_t group = i / 4;
    const auto words = philox({static_cast<std::uint32_t>(group),
                               static_cast<std::uint32_t>(group >> 32), place, kInitStream},
                              key);
    const auto [n0, n1] = normal_pair(words[0], words[1]);
    const auto [n2, n3] = normal_pair(words[2], words[3]);
    const std::array<double, 4> normals = {n0, n1, n2, n3};
    for (std::size_t j = 0; j < std::min<std::size_t>(4, end - i); ++j) {
      out[i + j] = static_cast<float>(normals[j] * deviation);
    }
  }
}

}  // namespace

void initialise(const ParameterLayout& layout, std::uint64_t seed, ThreadPool& pool,
                std::span<float> parameters) {
  LOCKSTEP_CHECK(parameters.size() == layout.size());
  const double into_residual = kDeviation / std::sqrt(2.0 * layout.config().layers);
  std::uint32_t place = 0;
  for (const TensorSpec& tensor : layout.tensors()) {
    float* out = parameters.data() + tensor.range.begin;
    if (!tensor.decay) {
      std::fill_n(out, tensor.range.size(), 1.0f);
    } else {
      const bool residual =
          tensor.component == Component::kOutput || tensor.component == Component::kDown;
      const std::size_t size = tensor.range.size();
      pool.run((size + kElementsPerTask - 1) / kElementsPerTask, [&](std::size_t task) {
        const std::size_t begin = task * kElementsPerTask;
        fill_normal(seed, place, residual ? into_residual : kDeviation, begin,
                    std::min(size, begin + kElementsPerTask), out);
      });
    }
    ++place;
  }
}

}  // namespace lockstep
