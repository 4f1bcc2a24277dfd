#include "lockstep/server/average.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "lockstep/base/check.h"
#include "lockstep/comm/kernels.h"

namespace lockstep {
namespace {

// Elements that are checked, weighed and added while they are in the first-level cache.
constexpr std::size_t kStrip = 2048;

float reciprocal(std::span<const std::uint64_t> weights) {
  const auto sum = std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
  return sum == 0 ? 0.0F : static_cast<float>(1.0 / static_cast<double>(sum));
}

void multiply(void* data, const std::vector<float>& factors, std::size_t count) {
  combine(ReduceOp::kProduct, DataType::kF32, data, data, factors.data(), count);
}

}  // namespace

std::string_view to_string(Average average) {
  switch (average) {
    case Average::kMean: return "mean";
    case Average::kWeighted: return "weighted";
  }
  return "?";
}

std::vector<CombineStep> worker_program(std::size_t workers) {
  std::vector<TreeNode> leaves;
  for (std::uint32_t i = 0; i < workers; ++i) leaves.push_back({i, i + 1});
  return combine_program(leaves, static_cast<std::uint32_t>(workers));
}

Averager::Averager(Average average, std::vector<std::uint64_t> weights)
    : average_(average),
      program_(worker_program(weights.size())),
      weights_(weights.begin(), weights.end()),
      factor_(reciprocal(weights)),
      strips_(weights.size()) {
  LOCKSTEP_CHECK(!weights.empty());
  if (average_ == Average::kMean) return;
  for (const float weight : weights_) repeated_.emplace_back(kStrip, weight);
  repeated_.emplace_back(kStrip, factor_);
}

std::optional<Averager::Defect> Averager::run(std::span<std::byte* const> inputs, float* out,
                                              std::size_t count) {
  LOCKSTEP_CHECK(inputs.size() == strips_.size());
  for (std::size_t done = 0; done < count; done += kStrip) {
    if (auto defect = run_strip(inputs, out, done, std::min(kStrip, count - done))) return defect;
  }
  return std::nullopt;
}

std::optional<Averager::Defect> Averager::run_strip(std::span<std::byte* const> inputs, float* out,
                                                    std::size_t offset, std::size_t count) {
  const bool weighted = average_ == Average::kWeighted;
  for (std::size_t worker = 0; worker < inputs.size(); ++worker) {
    std::byte* const strip = inputs[worker] + offset * sizeof(float);
    strips_[worker] = strip;
    const std::size_t at = find_non_finite(DataType::kF32, strip, count);
    if (at < count) {
      float value;
      std::memcpy(&value, strip + at * sizeof(float), sizeof(value));
      return Defect{static_cast<int>(worker), offset + at, value};
    }
    if (weighted) multiply(strip, repeated_[worker], count);
  }
  float* const sum = out + offset;
  void* const output = sum;
  const ReduceOp op = weighted ? ReduceOp::kSum : ReduceOp::kMean;
  reduce_tree({op, DataType::kF32, program_, static_cast<int>(inputs.size())}, strips_,
              {&output, 1}, count);
  if (weighted) multiply(sum, repeated_.back(), count);
  if (weighted && factor_ == 0) std::fill_n(sum, count, 0.0F);  // not -0
  const std::size_t at = find_non_finite(DataType::kF32, sum, count);
  if (at < count) return Defect{-1, offset + at, sum[at]};
  return std::nullopt;
}

}  // namespace lockstep
