#include "lockstep/model/cpu/decoder.h"

#include <fmt/format.h>

#include <algorithm>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/model/weights.h"

namespace lockstep {
namespace {

constexpr std::size_t kMostAtOnce = 128;  // tokens of one pass; a long prompt takes several

}  // namespace

Decoder::Decoder(const ParameterLayout& layout, std::span<const float> parameters,
                 Precision precision, ThreadPool& pool)
    : layout_(layout),
      parameters_(parameters),
      context_(static_cast<std::size_t>(layout.config().context)),
      hidden_(static_cast<std::size_t>(layout.config().hidden)),
      kv_hidden_(static_cast<std::size_t>(layout.config().kv_hidden())),
      intermediate_(static_cast<std::size_t>(layout.config().intermediate)),
      vocab_(static_cast<std::size_t>(layout.config().vocab)),
      layers_(layout.config(), precision, pool, kMostAtOnce, context_),
      stream_(kMostAtOnce * hidden_),
      sublayer_(kMostAtOnce * hidden_),
      normed_(kMostAtOnce * hidden_),
      rstd_(kMostAtOnce),
      qkv_(kMostAtOnce * (hidden_ + 2 * kv_hidden_)),
      attended_(kMostAtOnce * hidden_),
      lse_(kMostAtOnce * static_cast<std::size_t>(layout.config().heads)),
      gate_up_(kMostAtOnce * 2 * intermediate_),
      act_(kMostAtOnce * intermediate_),
      logits_(vocab_) {
  LOCKSTEP_CHECK(parameters.size() == layout.size());
  for (int block = 0; block < layout.config().layers; ++block) {
    caches_.emplace_back(context_ * 2 * kv_hidden_);
  }
}

void Decoder::truncate(std::size_t length) {
  LOCKSTEP_CHECK(length <= length_);
  length_ = length;
}

std::span<const float> Decoder::logits_after(std::span<const std::int32_t> tokens) {
  LOCKSTEP_CHECK(!tokens.empty());
  if (tokens.size() > context_ - length_) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} tokens after {}, where the model's context is {}", tokens.size(),
                            length_, context_));
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= 0 && tokens[i] < layout_.config().vocab) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("token {} at position {} is not in the vocabulary of {}", tokens[i],
                            length_ + i, vocab_));
  }
  std::size_t last = 0;  // tokens of the last pass
  for (std::size_t begin = 0; begin < tokens.size(); begin += last) {
    last = std::min(kMostAtOnce, tokens.size() - begin);
    read(tokens.subspan(begin, last));
  }
  const Weights<const float> weights(layout_, parameters_.data());
  layers_.linear({1, hidden_, vocab_}, normed_.data() + (last - 1) * hidden_, weights.lm_head(),
                 logits_.data());
  return logits_.span();
}

// Leaves the input of the lm_head in `normed_`.
void Decoder::read(std::span<const std::int32_t> tokens) {
  const Weights<const float> weights(layout_, parameters_.data());
  const std::size_t count = tokens.size();
  const std::size_t qkv_width = hidden_ + 2 * kv_hidden_;
  const auto norm = [&](const float* added, const float* weight) {
    layers_.norm({.rows = count,
                  .width = hidden_,
                  .x = stream_.data(),
                  .y = added,
                  .weight = weight,
                  .eps = layout_.config().norm_eps,
                  .sum = stream_.data(),
                  .out = normed_.data(),
                  .rstd = rstd_.data()});
  };
  layers_.embed(tokens, weights.embedding(), stream_.data());
  const float* added = nullptr;  // to the stream by the sublayer before
  for (int i = 0; i < layout_.config().layers; ++i) {
    const auto block = weights.block(i);
    float* cache = caches_[index_of(i)].data();
    norm(added, block.input_norm);
    layers_.linear({count, hidden_, qkv_width}, normed_.data(), block.qkv, qkv_.data());
    for (std::size_t t = 0; t < count; ++t) {
      std::copy_n(qkv_.data() + t * qkv_width + hidden_, 2 * kv_hidden_,
                  cache + (length_ + t) * 2 * kv_hidden_);
    }
    layers_.attend_cache(length_, count, qkv_.data(), cache, attended_.data(), lse_.data());
    layers_.linear({count, hidden_, hidden_}, attended_.data(), block.output, sublayer_.data());
    norm(sublayer_.data(), block.post_attention_norm);
    layers_.linear({count, hidden_, 2 * intermediate_}, normed_.data(), block.gate_up,
                   gate_up_.data());
    layers_.swiglu(
        {.rows = count, .width = intermediate_, .gate_up = gate_up_.data(), .act = act_.data()});
    layers_.linear({count, intermediate_, hidden_}, act_.data(), block.down, sublayer_.data());
    added = sublayer_.data();
  }
  norm(added, weights.final_norm());
  length_ += count;
}

}  // namespace lockstep
