#include "lockstep/data/lanes.h"

#include <fmt/format.h>

#include <bit>
#include <charconv>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/random.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kRounds = 6;
// Streams of their own, so that other uses of the seed do not share their numbers.
constexpr std::uint64_t kLanes = std::uint64_t{0x4c414e45} << 32;  // "LANE"

template <typename Number>
bool parse_number(std::string_view text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

}  // namespace

EpochPermutation::EpochPermutation(std::uint64_t size, std::uint64_t seed, std::uint64_t epoch)
    : size_(size),
      seed_(seed),
      epoch_(epoch),
      half_bits_((static_cast<int>(std::bit_width(size > 0 ? size - 1 : 0)) + 1) / 2) {
  if (half_bits_ == 0) half_bits_ = 1;
}

std::uint64_t EpochPermutation::encipher(std::uint64_t value) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  std::uint64_t left = value >> half_bits_;
  std::uint64_t right = value & mask;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    const std::uint64_t next =
        left ^ (random_u64(seed_, kLanes + epoch_, (round << 32) | right) & mask);
    left = right;
    right = next;
  }
  return (left << half_bits_) | right;
}

std::uint64_t EpochPermutation::operator()(std::uint64_t index) const {
  LOCKSTEP_CHECK(index < size_);
  // The network permutes fewer than four times as many values, so this takes a few turns.
  do {
    index = encipher(index);
  } while (index >= size_);
  return index;
}

void LanePlan::sample_ids(std::uint64_t step, std::uint32_t lane,
                          std::span<std::uint64_t> out) const {
  LOCKSTEP_CHECK(lane < lanes() && out.size() == micro_batch);
  samples_from(step, lane * micro_batch, out);
}

void LanePlan::samples_from(std::uint64_t step, std::uint64_t first,
                            std::span<std::uint64_t> out) const {
  LOCKSTEP_CHECK(first + out.size() <= global_batch);
  std::uint64_t position = step * global_batch + first;
  for (std::uint64_t& id : out) {
    id = mix.empty() ? EpochPermutation(samples, seed, position / samples)(position % samples)
                     : mixed_sample(mix, seed, position);
    ++position;
  }
}

double LanePlan::epochs(std::uint64_t steps) const {
  return static_cast<double>(steps) * static_cast<double>(global_batch) /
         static_cast<double>(samples);
}

void validate(const LanePlan& plan) {
  const auto require = [](bool condition, const std::string& message) {
    if (!condition) throw Error(ErrorCode::kInvalidArgument, message);
  };
  require(plan.samples > 0, "there are no samples to train on");
  require(plan.micro_batch > 0 && plan.global_batch > 0, "batches have at least one sample");
  require(plan.global_batch % plan.micro_batch == 0,
          fmt::format("--micro-batch {} does not divide --global-batch {}", plan.micro_batch,
                      plan.global_batch));
  if (plan.mix.empty()) return;
  std::uint64_t samples = 0;
  std::uint64_t shares = 0;
  for (const MixPart& part : plan.mix) {
    require(part.samples > 0, "a part of the mix has no samples to train on");
    samples += part.samples;
    shares += part.share;
  }
  require(samples == plan.samples && shares == kMixBlock, "the mix does not add up");
}

std::optional<SkippedLane> parse_skipped_lane(std::string_view text) {
  const std::size_t colon = text.find(':');
  SkippedLane lane;
  if (colon == std::string_view::npos || !parse_number(text.substr(0, colon), lane.step) ||
      !parse_number(text.substr(colon + 1), lane.lane) || lane.step < 1) {
    return std::nullopt;
  }
  return lane;
}

std::vector<std::size_t> shard_batches(std::size_t num_batches, std::size_t rank,
                                       std::size_t world_size) {
  LOCKSTEP_CHECK(world_size > 0);
  std::vector<std::size_t> batches;
  for (std::size_t batch = rank; batch < num_batches; batch += world_size) batches.push_back(batch);
  return batches;
}

}  // namespace lockstep
