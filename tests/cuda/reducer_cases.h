#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "lockstep/base/canonical_tree.h"
#include "lockstep/base/cuda/runtime.h"
#include "lockstep/base/random.h"
#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {

inline void upload(const std::vector<float>& values, float* to) {
  check_cuda(cudaMemcpy(to, values.data(), values.size() * sizeof(float), cudaMemcpyDefault),
             "copying to the device");
  // Memory of the host that is not page-locked may still be on its way, and the streams of tests
  // do not wait for this one.
  check_cuda(cudaStreamSynchronize(nullptr), "copying to the device");
}

inline std::vector<float> download(const float* from, std::size_t count) {
  std::vector<float> values(count);
  check_cuda(cudaMemcpy(values.data(), from, count * sizeof(float), cudaMemcpyDefault),
             "copying from the device");
  return values;
}

inline std::vector<std::uint32_t> bits(const std::vector<float>& values) {
  std::vector<std::uint32_t> words;
  for (const float value : values) words.push_back(std::bit_cast<std::uint32_t>(value));
  return words;
}

// Of very different magnitudes and both signs, so that a sum shows its order.
inline std::vector<float> wild_numbers(std::size_t count, std::uint64_t stream) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t word = random_u64(7, stream, i);
    const int exponent = static_cast<int>(word % 41) - 20;
    values[i] = std::ldexp(random_f32(8, stream, i) + 0.5F, exponent);
    if ((word >> 32) % 2 == 1) values[i] = -values[i];
  }
  return values;
}

inline std::vector<float> added(std::vector<float> left, const std::vector<float>& right) {
  for (std::size_t i = 0; i < left.size(); ++i) left[i] += right[i];
  return left;
}

// The canonical tree by its definition.
inline std::vector<float> tree_of(std::span<const std::vector<float>> leaves) {
  if (leaves.size() == 1) return leaves[0];
  const std::size_t split = tree_split(leaves.size());
  return added(tree_of(leaves.first(split)), tree_of(leaves.subspan(split)));
}

inline std::vector<float> chain_of(std::span<const std::vector<float>> values) {
  std::vector<float> sum = values[0];
  for (const auto& value : values.subspan(1)) sum = added(std::move(sum), value);
  return sum;
}

}  // namespace lockstep
