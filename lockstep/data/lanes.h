#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "lockstep/data/mix.h"

namespace lockstep {

// A permutation of [0, size), drawn by (seed, epoch): a Feistel network over the next even power of
// two, walked until it lands inside. Nothing is stored. Part of the result of a run: never change
// it.
class EpochPermutation {
 public:
  EpochPermutation(std::uint64_t size, std::uint64_t seed, std::uint64_t epoch);
  std::uint64_t operator()(std::uint64_t index) const;

 private:
  std::uint64_t encipher(std::uint64_t value) const;

  std::uint64_t size_;
  std::uint64_t seed_;
  std::uint64_t epoch_;
  int half_bits_;
};

// Which samples a step trains on. All samples are walked through in one permutation per epoch; a
// step takes the next `global_batch` of them, of which lane v has the v-th `micro_batch`. So a
// lane's samples are a function of (seed, step, lane), and every sample comes once per epoch. With
// a mix every source is walked through so, at the pace of its share.
struct LanePlan {
  std::uint64_t samples = 0;
  std::uint64_t seed = 0;
  std::uint64_t global_batch = 0;
  std::uint64_t micro_batch = 0;
  std::vector<MixPart> mix = {};  // empty: one source

  std::uint32_t lanes() const { return static_cast<std::uint32_t>(global_batch / micro_batch); }
  // Fills `out`, of micro_batch elements.
  void sample_ids(std::uint64_t step, std::uint32_t lane, std::span<std::uint64_t> out) const;
  // The samples of a step from number `first` on, which is below global_batch as is the last.
  void samples_from(std::uint64_t step, std::uint64_t first, std::span<std::uint64_t> out) const;
  // Passes over the data that are done when `steps` steps are.
  double epochs(std::uint64_t steps) const;
};

// Throws Error{kInvalidArgument} when there are no samples, or the batches do not divide.
void validate(const LanePlan& plan);

// A lane of a step that is left out, as --skip-lanes has it: STEP:LANE, steps counted from 1.
struct SkippedLane {
  std::int64_t step = 0;
  std::uint32_t lane = 0;
  auto operator<=>(const SkippedLane&) const = default;
};
// Nothing for text of another form.
std::optional<SkippedLane> parse_skipped_lane(std::string_view text);

// The batches of rank `rank` when `num_batches` are dealt out in turn: rank, rank + world_size, ...
std::vector<std::size_t> shard_batches(std::size_t num_batches, std::size_t rank,
                                       std::size_t world_size);

}  // namespace lockstep
