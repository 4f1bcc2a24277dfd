#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// Data of several sources, each drawn as often as its weight says (--mix). The sources take turns,
// spread as evenly as can be, so every step has about the same of each; each source is walked
// through in one permutation per pass. Which sample comes at a position is a function of seed,
// shares and sizes. Pure.

// Of every kMixBlock samples that a run draws, a source has exactly its share.
inline constexpr std::uint64_t kMixBlock = 10'000;

struct MixPart {
  std::uint64_t samples = 0;  // those of the parts lie end to end
  std::uint64_t share = 0;    // of kMixBlock; all shares together are kMixBlock
  bool operator==(const MixPart&) const = default;
};

// The parts of a run's mix, for training and for validation. Empty: one source.
struct Mix {
  std::vector<MixPart> training;
  std::vector<MixPart> validation;
};

// The weights as shares that add up to `total`: the largest remainders are rounded up, of equal
// ones the first.
std::vector<std::uint64_t> apportion(std::span<const double> weights, std::uint64_t total);

// "3,1" as weights; nothing is none. Throws Error{kInvalidArgument} for what is no list of positive
// numbers, and for a weight that is less than one in kMixBlock of all.
std::vector<double> parse_mix(std::string_view text);

// The `position`-th sample of a run. Part of the result of a run: never change it.
std::uint64_t mixed_sample(std::span<const MixPart> parts, std::uint64_t seed,
                           std::uint64_t position);

// How often the samples of a part are drawn in `drawn` samples of the run.
double passes(const MixPart& part, double drawn);

// `count` samples for validation, always the same: shared out to the parts as the mix is, and
// spread evenly over each. Without a mix there is one part.
std::vector<std::uint64_t> spread_samples(std::span<const MixPart> parts, std::uint64_t count);

// "70 % and 30 %", for people.
std::string to_string(std::span<const MixPart> parts);

}  // namespace lockstep
