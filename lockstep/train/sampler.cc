#include "lockstep/train/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/base/random.h"

namespace lockstep {
namespace {

constexpr std::uint64_t kSampling = std::uint64_t{0x53414d50} << 32;  // "SAMP": a stream of its own

// Uniform in [0, 1).
double draw(std::uint64_t seed, std::uint64_t position) {
  return static_cast<double>(random_u64(seed, kSampling, position) >> 11) * 0x1p-53;
}

}  // namespace

std::int32_t sample_token(std::span<const float> logits, const SamplerOptions& options,
                          std::uint64_t position) {
  LOCKSTEP_CHECK(!logits.empty());
  if (options.vocab > 0 && options.vocab < logits.size()) logits = logits.first(options.vocab);
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](std::int32_t a, std::int32_t b) {
    const float x = logits[index_of(a)];
    const float y = logits[index_of(b)];
    return x > y || (x == y && a < b);
  };
  if (options.temperature == 0) return *std::ranges::min_element(order, likelier);
  std::ranges::sort(order, likelier);
  if (options.top_k > 0 && static_cast<std::size_t>(options.top_k) < order.size()) {
    order.resize(static_cast<std::size_t>(options.top_k));
  }

  std::vector<double> weights(order.size());
  const double most = logits[static_cast<std::size_t>(order[0])];
  double total = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    weights[i] =
        std::exp((logits[static_cast<std::size_t>(order[i])] - most) / options.temperature);
    total += weights[i];
  }
  if (options.top_p < 1) {
    double kept = 0;
    std::size_t count = 0;
    while (count < weights.size() && (count == 0 || kept < options.top_p * total))
      kept += weights[count++];
    weights.resize(count);
    total = kept;
  }
  double ticket = draw(options.seed, position) * total;
  for (std::size_t i = 0; i + 1 < weights.size(); ++i) {
    if (ticket < weights[i]) return order[i];
    ticket -= weights[i];
  }
  return order[weights.size() - 1];
}

void generate_tokens(SequenceReader& reader, int context, std::span<const std::int32_t> prompt,
                     const SamplerOptions& options, std::int64_t count,
                     std::optional<std::int32_t> end,
                     const std::function<bool(std::int32_t)>& token) {
  const auto longest = static_cast<std::size_t>(context);
  std::vector<std::int32_t> text(prompt.begin(), prompt.end());
  std::size_t fresh = text.size();  // not read yet
  for (std::int64_t i = 0; i < count; ++i) {
    if (reader.length() + fresh > longest) {
      reader.truncate(0);
      fresh = std::min(text.size(), std::max<std::size_t>(longest / 2, 1));
    }
    const auto logits = reader.logits_after(std::span(text).last(fresh));
    const std::int32_t next = sample_token(logits, options, static_cast<std::uint64_t>(i));
    if (end && next == *end) return;
    text.push_back(next);
    fresh = 1;
    if (!token(next)) return;
  }
}

}  // namespace lockstep
