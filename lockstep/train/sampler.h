#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/model/cpu/decoder.h"

namespace lockstep {

struct SamplerOptions {
  double temperature = 0.8;  // 0: always the likeliest
  int top_k = 0;             // only so many of the likeliest; 0: all
  double top_p = 1.0;        // only the likeliest that together have this probability
  std::uint64_t seed = 0;
};

// The token at `position`, drawn by (seed, position) from softmax(logits / temperature), cut to
// top_k and then to top_p. Of equal logits the lower token comes first.
std::int32_t sample_token(std::span<const float> logits, const SamplerOptions& options,
                          std::uint64_t position);

// Goes on from `prompt`, at least one token, for at most `count` tokens or until `end` is drawn,
// which is not given out. Past the context's length it goes on with the later half of what it has.
// `token` is called for each; false stops.
void generate_tokens(Decoder& decoder, int context, std::span<const std::int32_t> prompt,
                     const SamplerOptions& options, std::int64_t count,
                     std::optional<std::int32_t> end,
                     const std::function<bool(std::int32_t)>& token);

}  // namespace lockstep
