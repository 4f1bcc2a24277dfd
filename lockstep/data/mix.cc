#include "lockstep/data/mix.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/random.h"
#include "lockstep/data/lanes.h"

namespace lockstep {
namespace {

// A stream of its own, for the orders of the parts' samples.
constexpr std::uint64_t kMixSeeds = std::uint64_t{0x4d495853} << 32;  // "MIXS"

// Of the positions before `position`, how many a part of `share` in `all` takes: evenly spread.
std::uint64_t taken_before(std::uint64_t position, std::uint64_t share, std::uint64_t all) {
  return position / all * share + (position % all * share + all / 2) / all;
}

[[noreturn]] void refuse_mix(std::string_view text, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("--mix {}: {}", text, why));
}

}  // namespace

std::vector<std::uint64_t> apportion(std::span<const double> weights, std::uint64_t total) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<std::uint64_t> shares;
  std::vector<double> remainders;
  std::uint64_t given = 0;
  for (const double weight : weights) {
    const double exact = weight / sum * static_cast<double>(total);
    shares.push_back(static_cast<std::uint64_t>(exact));
    remainders.push_back(exact - std::floor(exact));
    given += shares.back();
  }
  for (; given < total; ++given) {
    const auto largest = std::ranges::max_element(remainders) - remainders.begin();
    ++shares[static_cast<std::size_t>(largest)];
    remainders[static_cast<std::size_t>(largest)] = -1;
  }
  return shares;
}

std::vector<double> parse_mix(std::string_view text) {
  std::vector<double> weights;
  if (text.empty()) return weights;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string word(text.substr(begin, end - begin));
    char* rest = nullptr;
    const double weight = std::strtod(word.c_str(), &rest);
    if (word.empty() || *rest != '\0' || !std::isfinite(weight) || weight <= 0) {
      refuse_mix(text, fmt::format("'{}' is no positive number; it takes a weight for every path "
                                   "of --data, such as 3,1",
                                   word));
    }
    weights.push_back(weight);
    begin = end + 1;
  }
  if (!std::isfinite(std::accumulate(weights.begin(), weights.end(), 0.0))) {
    refuse_mix(text, "the weights are too large to be added up");
  }
  const std::vector<std::uint64_t> shares = apportion(weights, kMixBlock);
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (shares[i] > 0) continue;
    refuse_mix(text, fmt::format("{} is less than one in {} of all", weights[i], kMixBlock));
  }
  return weights;
}

std::uint64_t mixed_sample(std::span<const MixPart> parts, std::uint64_t seed,
                           std::uint64_t position) {
  std::uint64_t left = kMixBlock;  // shares of this part and those behind it
  std::uint64_t first = 0;         // sample of this part
  for (std::size_t i = 0;; ++i) {
    LOCKSTEP_CHECK(i < parts.size());
    const MixPart& part = parts[i];
    const std::uint64_t before = taken_before(position, part.share, left);
    if (taken_before(position + 1, part.share, left) > before) {
      const EpochPermutation order(part.samples, random_u64(seed, kMixSeeds, i),
                                   before / part.samples);
      return first + order(before % part.samples);
    }
    position -= before;  // among those of the parts behind
    left -= part.share;
    first += part.samples;
  }
}

double passes(const MixPart& part, double drawn) {
  return drawn * static_cast<double>(part.share) /
         (static_cast<double>(kMixBlock) * static_cast<double>(part.samples));
}

std::vector<std::uint64_t> spread_samples(std::span<const MixPart> parts, std::uint64_t count) {
  std::vector<double> weights;  // a part without samples has none to give
  for (const MixPart& part : parts) {
    weights.push_back(part.samples > 0 ? static_cast<double>(part.share) : 0);
  }
  std::vector<std::uint64_t> ids;
  if (count == 0 || std::accumulate(weights.begin(), weights.end(), 0.0) == 0) return ids;
  const std::vector<std::uint64_t> counts = apportion(weights, count);
  std::uint64_t first = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (std::uint64_t j = 0; j < counts[i]; ++j) {
      ids.push_back(first + j * parts[i].samples / counts[i]);
    }
    first += parts[i].samples;
  }
  return ids;
}

std::string to_string(std::span<const MixPart> parts) {
  std::string text;
  for (const MixPart& part : parts) {
    if (!text.empty()) text += " and ";
    text += fmt::format("{:g} % of {} samples",
                        100 * static_cast<double>(part.share) / static_cast<double>(kMixBlock),
                        part.samples);
  }
  return text.empty() ? "none" : text;
}

}  // namespace lockstep
