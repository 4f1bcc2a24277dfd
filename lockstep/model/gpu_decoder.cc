#include "lockstep/model/gpu_decoder.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/index.h"

namespace lockstep {

GpuModelOptions gpu_decoder_options(const ModelConfig& model, int context) {
  return {.model = model,
          .precision = Precision::kF32,
          .adamw = {},
          .rows = 1,
          .context = context,
          .accumulators = 0,
          .shard = {0, std::min(ParameterLayout(model).size(), kNormBlock)},
          .recompute = true};  // no backward pass needs the activations
}

GpuDecoder::GpuDecoder(std::unique_ptr<GpuModel> model, int context)
    : model_(std::move(model)),
      context_(index_of(context)),
      logits_(index_of(model_->layout().config().vocab)) {}

std::span<const float> GpuDecoder::logits_after(std::span<const std::int32_t> tokens) {
  LOCKSTEP_CHECK(!tokens.empty());
  if (tokens_.size() + tokens.size() > context_) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} tokens, where the context has {}",
                                                         tokens_.size() + tokens.size(), context_));
  }
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  model_->logits(tokens_, logits_);
  return logits_;
}

void GpuDecoder::truncate(std::size_t length) {
  LOCKSTEP_CHECK(length <= tokens_.size());
  tokens_.resize(length);
}

}  // namespace lockstep
