#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "lockstep/model/sequence_reader.h"

namespace lockstep {

struct SamplerOptions {
  double temperature = 0.8;  // 0: always the likeliest token
  int top_k = 0;             // draw from this many of the likeliest tokens; 0: from all
  double top_p = 1.0;        // draw from the likeliest tokens that have this probability together
  std::uint64_t seed = 0;
  std::uint32_t vocab = 0;  // draw from the tokens below it, which have a text; 0: from all
};

// The token at `position`, drawn from softmax(logits / temperature), which is cut to top_k and then
// to top_p. A function of seed and position. Of equal logits the lower token comes first.
std::int32_t sample_token(std::span<const float> logits, const SamplerOptions& options,
                          std::uint64_t position);

// Continues `prompt`, which has at least one token, with a reader that has read nothing, by at most
// `count` tokens, and stops when `end` is drawn. Calls `token` for every token but `end`; false
// stops. When the context is full, the later half of it is kept.
void generate_tokens(SequenceReader& reader, int context, std::span<const std::int32_t> prompt,
                     const SamplerOptions& options, std::int64_t count,
                     std::optional<std::int32_t> end,
                     const std::function<bool(std::int32_t)>& token);

}  // namespace lockstep
