#include "cli/synthetic.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/base/random.h"
#include "lockstep/server/round.h"

namespace lockstep::cli {
namespace {

constexpr std::uint32_t kLossPart = 0xffffffff;

std::uint32_t low(std::uint64_t value) { return static_cast<std::uint32_t>(value); }

std::array<std::uint32_t, 4> words(std::uint64_t seed, std::uint64_t step, std::uint32_t source,
                                   std::uint32_t part, std::size_t group) {
  return philox({low(group), part, low(step), source}, {low(seed), low(seed >> 32)});
}

// Of the 24 upper bits, so it is exact.
float in_unit_range(std::uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-23F - 1.0F; }

}  // namespace

std::vector<std::uint32_t> SyntheticShape::block_sizes() const {
  const std::uint32_t square = hidden * hidden;
  const std::uint32_t wide = hidden * intermediate;
  return {square, square, square, square, wide, wide, wide, hidden, hidden};
}

std::size_t SyntheticShape::block_elements() const {
  const auto sizes = block_sizes();
  return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
}

std::size_t SyntheticShape::component_elements(std::uint8_t component) const {
  return component == 1 ? hidden : std::size_t{hidden} * vocab;
}

std::size_t SyntheticShape::vector_elements() const {
  if (elements > 0) return elements;
  std::size_t all = blocks * block_elements();
  for (std::uint8_t i = 0; i < kComponents; ++i) all += component_elements(i);
  return all;
}

void synthetic_gradient(std::uint64_t seed, std::uint64_t step, std::uint32_t source,
                        std::uint32_t part, std::span<float> gradient) {
  for (std::size_t i = 0; i < gradient.size(); i += 4) {
    const auto random = words(seed, step, source, part, i / 4);
    for (std::size_t j = 0; j < std::min<std::size_t>(4, gradient.size() - i); ++j) {
      gradient[i + j] = in_unit_range(random[j]);
    }
  }
}

float synthetic_loss(std::uint64_t seed, std::uint64_t step, std::uint32_t source) {
  return in_unit_range(words(seed, step, source, kLossPart, 0)[0]) + 2.0F;
}

SyntheticJob::SyntheticJob(WorkerClient& client, const SyntheticOptions& options)
    : client_(client),
      options_(options),
      mode_(client.settings() ? client.settings()->mode : options.mode) {
  LOCKSTEP_CHECK(!options_.check || client.settings());
}

std::optional<SyntheticJob::Report> SyntheticJob::step() {
  Report report;
  const bool done = mode_ == Mode::kVector ? vector_step(report) : block_step(report);
  return done ? std::optional(report) : std::nullopt;
}

bool SyntheticJob::vector_step(Report& report) {
  report.shard = client_.next_shard();
  if (!report.shard) return false;
  const std::uint64_t step = report.step = report.shard->step;
  const std::uint64_t samples = report.shard->size();
  const auto self = static_cast<std::uint32_t>(client_.worker_id());
  gradient_.resize(options_.shape.vector_elements());
  synthetic_gradient(options_.seed, step, self, 0, gradient_);
  client_.send_gradient(step, gradient_, synthetic_loss(options_.seed, step, self), samples / 2,
                        samples);
  report.loss = client_.receive_averaged(step, gradient_);
  check_average(step, 0, gradient_, report);
  return true;
}

bool SyntheticJob::block_step(Report& report) {
  const std::uint64_t step = report.step = next_step_;
  const auto self = static_cast<std::uint32_t>(client_.worker_id());
  const auto sizes = options_.shape.block_sizes();
  for (std::uint32_t block = options_.shape.blocks; block-- > 0;) {
    gradient_.resize(options_.shape.block_elements());
    synthetic_gradient(options_.seed, step, self, block + 1, gradient_);
    client_.send_block(step, block, options_.shape.blocks, gradient_, sizes);
    const auto received = client_.receive_averaged_block(step, block, gradient_);
    if (!received && block + 1 == options_.shape.blocks) return false;  // the job is done
    if (received != sizes) {
      throw Error(
          ErrorCode::kComponentMismatch,
          received ? fmt::format("the average of block {} came with other component sizes", block)
                   : fmt::format("{} ended the job in the middle of step {}", client_.coordinator(),
                                 step_number(step)));
    }
    check_average(step, block + 1, gradient_, report);
  }
  for (std::uint8_t component = 0; component < kComponents; ++component) {
    gradient_.resize(options_.shape.component_elements(component));
    const std::uint32_t part = kSyntheticComponents + component;
    synthetic_gradient(options_.seed, step, self, part, gradient_);
    client_.send_component(step, component, gradient_);
    client_.receive_averaged_component(step, component, gradient_);
    check_average(step, part, gradient_, report);
  }
  ++next_step_;
  return true;
}

std::vector<float> SyntheticJob::sum(std::uint64_t step, std::uint32_t part, Range sources,
                                     std::size_t elements, std::span<const float> weights) const {
  if (sources.size() == 1) {
    std::vector<float> leaf(elements);
    synthetic_gradient(options_.seed, step, static_cast<std::uint32_t>(sources.begin), part, leaf);
    if (!weights.empty()) {
      for (float& value : leaf) value *= weights[sources.begin];
    }
    return leaf;
  }
  const std::size_t middle = sources.begin + tree_split(sources.size());
  std::vector<float> left = sum(step, part, {sources.begin, middle}, elements, weights);
  const std::vector<float> right = sum(step, part, {middle, sources.end}, elements, weights);
  for (std::size_t i = 0; i < elements; ++i) left[i] += right[i];
  return left;
}

void SyntheticJob::check_average(std::uint64_t step, std::uint32_t part,
                                 std::span<const float> received, Report& report) const {
  report.elements += received.size();
  if (!options_.check) return;
  const ServerSettings& settings = *client_.settings();
  const int workers = client_.total_workers();
  std::vector<float> weights;
  std::uint64_t total = static_cast<std::uint64_t>(workers);
  if (mode_ == Mode::kVector && settings.average == Average::kWeighted) {
    for (int i = 0; i < workers; ++i) {
      const Shard shard = shard_of(step, settings.total_samples, workers, i);
      weights.push_back(static_cast<float>(shard.size()));
    }
    total = settings.total_samples;
  }
  std::vector<float> expected = sum(step, part, {0, index_of(workers)}, received.size(), weights);
  const float factor = total == 0 ? 0.0F : static_cast<float>(1.0 / static_cast<double>(total));
  for (float& value : expected) value = total == 0 ? 0.0F : value * factor;
  compare(step, part == 0 ? "vector" : fmt::format("part {}", part), expected, received, report);
}

void SyntheticJob::compare(std::uint64_t step, std::string_view what,
                           std::span<const float> expected, std::span<const float> received,
                           Report& report) const {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (std::bit_cast<std::uint32_t>(expected[i]) == std::bit_cast<std::uint32_t>(received[i])) {
      continue;
    }
    throw Error(ErrorCode::kCollectiveMismatch,
                fmt::format("step {}, {}: element {} should be {:a}, but is {:a}",
                            step_number(step), what, i, expected[i], received[i]));
  }
  report.compared += expected.size();
}

}  // namespace lockstep::cli
