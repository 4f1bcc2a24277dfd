#include "lockstep/server/average.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "lockstep/base/check.h"
#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {
namespace {

// Elements whose products and sums stay in the first-level cache.
constexpr std::size_t kStrip = 1024;

float reciprocal(std::span<const std::uint64_t> weights) {
  const auto sum = std::accumulate(weights.begin(), weights.end(), std::uint64_t{0});
  return sum == 0 ? 0.0F : static_cast<float>(1.0 / static_cast<double>(sum));
}

void multiply(float* to, const void* data, const std::vector<float>& factors, std::size_t count) {
  combine(ReduceOp::kProduct, DataType::kF32, to, data, factors.data(), count);
}

// The tree over workers 0..n-1.
std::vector<CombineStep> worker_program(std::size_t workers) {
  std::vector<Range> leaves;
  for (std::size_t i = 0; i < workers; ++i) leaves.push_back({i, i + 1});
  return combine_program(leaves, workers);
}

}  // namespace

std::string_view to_string(Average average) {
  switch (average) {
    case Average::kMean: return "mean";
    case Average::kWeighted: return "weighted";
  }
  return "?";
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
  products_.assign(weights_.size(), std::vector<float>(kStrip));
  repeated_.emplace_back(kStrip, factor_);
}

std::optional<Averager::Defect> Averager::run(std::span<const std::byte* const> inputs, float* out,
                                              std::size_t count) {
  LOCKSTEP_CHECK(inputs.size() == strips_.size());
  for (std::size_t done = 0; done < count; done += kStrip) {
    if (auto defect = run_strip(inputs, out, done, std::min(kStrip, count - done))) return defect;
  }
  return std::nullopt;
}

std::optional<Averager::Defect> Averager::run_strip(std::span<const std::byte* const> inputs,
                                                    float* out, std::size_t offset,
                                                    std::size_t count) {
  const bool weighted = average_ == Average::kWeighted;
  for (std::size_t worker = 0; worker < inputs.size(); ++worker) {
    strips_[worker] = inputs[worker] + offset * sizeof(float);
    if (!weighted || weights_[worker] == 1) continue;
    multiply(products_[worker].data(), strips_[worker], repeated_[worker], count);
    strips_[worker] = products_[worker].data();
  }
  float* const sum = out + offset;
  void* const output = sum;
  const ReduceOp op = weighted ? ReduceOp::kSum : ReduceOp::kMean;
  reduce_tree({op, DataType::kF32, program_, static_cast<int>(inputs.size())}, strips_,
              {&output, 1}, count);
  // What is not finite stays so up to here, whatever it is added to or multiplied with.
  if (weighted) multiply(sum, sum, repeated_.back(), count);
  const std::size_t at = find_non_finite(DataType::kF32, sum, count);
  if (at < count) return find_defect(inputs, sum, offset, count, at);
  if (weighted && factor_ == 0) std::fill_n(sum, count, 0.0F);  // not -0
  return std::nullopt;
}

Averager::Defect Averager::find_defect(std::span<const std::byte* const> inputs, const float* sum,
                                       std::size_t offset, std::size_t count,
                                       std::size_t at) const {
  for (std::size_t worker = 0; worker < inputs.size(); ++worker) {
    const std::byte* const strip = inputs[worker] + offset * sizeof(float);
    const std::size_t found = find_non_finite(DataType::kF32, strip, count);
    if (found == count) continue;
    float value;
    std::memcpy(&value, strip + found * sizeof(float), sizeof(value));
    return {static_cast<int>(worker), offset + found, value};
  }
  return {-1, offset + at, sum[at]};
}

}  // namespace lockstep
