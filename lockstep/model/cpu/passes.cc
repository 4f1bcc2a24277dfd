#include "lockstep/model/cpu/passes.h"

#include <algorithm>

namespace lockstep {
namespace {

std::size_t tokens_per_chunk(std::size_t vocab, std::size_t max_tokens) {
  constexpr std::size_t kLogits = std::size_t{4} << 20;
  return std::min(max_tokens, std::clamp<std::size_t>(kLogits / vocab / 64 * 64, 64, 1024));
}

}  // namespace

Passes::Passes(const ParameterLayout& layout, Precision precision, ThreadPool& pool,
               std::size_t max_tokens, std::size_t max_context, bool recompute)
    : layout_(layout),
      hidden_(static_cast<std::size_t>(layout.config().hidden)),
      qkv_width_(hidden_ + 2 * static_cast<std::size_t>(layout.config().kv_hidden())),
      intermediate_(static_cast<std::size_t>(layout.config().intermediate)),
      vocab_(static_cast<std::size_t>(layout.config().vocab)),
      chunk_(tokens_per_chunk(vocab_, max_tokens)),
      layers_(layout.config(), precision, pool, max_tokens, max_context),
      recompute_(recompute),
      sublayer_(max_tokens * hidden_),
      act_(max_tokens * intermediate_),
      output_(max_tokens * hidden_),
      output_rstd_(max_tokens),
      normed_output_(max_tokens * hidden_),
      logits_(chunk_ * vocab_),
      losses_(max_tokens),
      correct_(max_tokens),
      dx_(max_tokens * hidden_),
      dnormed_(max_tokens * hidden_),
      dact_(max_tokens * intermediate_),
      dqkv_(max_tokens * qkv_width_) {
  const auto wide = [max_tokens](std::size_t width) { return FloatBuffer(max_tokens * width); };
  for (int block = 0; block < layout.config().layers; ++block) {
    inputs_.push_back(wide(hidden_));
    if (recompute_ && block > 0) continue;
    blocks_.push_back({.input_rstd = wide(1),
                       .normed_input = wide(hidden_),
                       .qkv = wide(qkv_width_),
                       .lse = wide(static_cast<std::size_t>(layout.config().heads)),
                       .attended = wide(hidden_),
                       .middle = wide(hidden_),
                       .middle_rstd = wide(1),
                       .normed_middle = wide(hidden_),
                       .gate_up = wide(2 * intermediate_)});
  }
}

void Passes::forward(const Weights<const float>& weights, const Batch& batch) {
  rows_ = static_cast<std::size_t>(batch.rows);
  context_ = static_cast<std::size_t>(batch.context);
  tokens_ = rows_ * context_;
  layers_.embed(batch.tokens, weights.embedding(), inputs_.front().data());
  const float* stream = inputs_.front().data();
  const float* added = nullptr;  // to the stream by the sublayer before
  for (int i = 0; i < layout_.config().layers; ++i) {
    const Parameters block_weights = weights.block(i);
    forward_block(i, block_weights, stream, added);
    layers_.swiglu({.rows = tokens_,
                    .width = intermediate_,
                    .gate_up = memory(i).gate_up.data(),
                    .act = act_.data()});
    layers_.linear(size(intermediate_, hidden_), act_.data(), block_weights.down, sublayer_.data());
    stream = memory(i).middle.data();
    added = sublayer_.data();
  }
  layers_.norm({.rows = tokens_,
                .width = hidden_,
                .x = stream,
                .y = added,
                .weight = weights.final_norm(),
                .eps = layout_.config().norm_eps,
                .sum = output_.data(),
                .out = normed_output_.data(),
                .rstd = output_rstd_.data()});
}

// A block up to its gates: its input is the stream and what is added to it.
void Passes::forward_block(int index, const Parameters& weights, const float* stream,
                           const float* added) {
  const float eps = layout_.config().norm_eps;
  BlockMemory& block = memory(index);
  FloatBuffer& input = inputs_[index_of(index)];
  layers_.norm({.rows = tokens_,
                .width = hidden_,
                .x = stream,
                .y = added,
                .weight = weights.input_norm,
                .eps = eps,
                .sum = input.data(),
                .out = block.normed_input.data(),
                .rstd = block.input_rstd.data()});
  layers_.linear(size(hidden_, qkv_width_), block.normed_input.data(), weights.qkv,
                 block.qkv.data());
  layers_.attention(rows_, context_, block.qkv.data(), block.attended.data(), block.lse.data());
  layers_.linear(size(hidden_, hidden_), block.attended.data(), weights.output, sublayer_.data());
  layers_.norm({.rows = tokens_,
                .width = hidden_,
                .x = input.data(),
                .y = sublayer_.data(),
                .weight = weights.post_attention_norm,
                .eps = eps,
                .sum = block.middle.data(),
                .out = block.normed_middle.data(),
                .rstd = block.middle_rstd.data()});
  layers_.linear(size(hidden_, 2 * intermediate_), block.normed_middle.data(), weights.gate_up,
                 block.gate_up.data());
}

void Passes::logits(const Weights<const float>& weights, float* out) {
  layers_.linear(size(hidden_, vocab_), normed_output_.data(), weights.lm_head(), out);
}

LossSum Passes::loss(const Weights<const float>& weights, const Batch& batch) {
  return heads(weights, batch, nullptr);
}

// The lm_head and the loss, chunk by chunk: logits, their gradients in the same memory, and what
// follows from them before the next chunk.
LossSum Passes::heads(const Weights<const float>& weights, const Batch& batch, float* dlm_head) {
  for (std::size_t begin = 0; begin < tokens_; begin += chunk_) {
    const Layers::Linear part = {std::min(chunk_, tokens_ - begin), hidden_, vocab_};
    const float* normed = normed_output_.data() + begin * hidden_;
    layers_.linear(part, normed, weights.lm_head(), logits_.data());
    layers_.cross_entropy({.rows = part.tokens,
                           .width = vocab_,
                           .logits = logits_.data(),
                           .targets = batch.targets.data() + begin,
                           .gradient = dlm_head != nullptr,
                           .loss = losses_.data() + begin,
                           .correct = correct_.data() + begin});
    if (dlm_head == nullptr) continue;
    layers_.linear_backward(part, logits_.data(), weights.lm_head(),
                            dnormed_.data() + begin * hidden_);
    layers_.linear_weights(part, logits_.data(), normed, begin > 0, dlm_head);
  }
  LossSum sum;
  for (std::size_t i = 0; i < tokens_; ++i) {
    sum.loss += losses_[i];
    sum.tokens += batch.targets[i] >= 0 ? 1 : 0;
    sum.correct += correct_[i];
  }
  return sum;
}

LossSum Passes::backward(const Weights<const float>& weights, const Batch& batch,
                         const Weights<float>& gradient, const RangeReady& ready) {
  const bool tied = layout_.config().tie_embeddings;
  const LossSum sum = heads(weights, batch, gradient.lm_head());
  if (!tied) tell(ready, Component::kLmHead, Component::kLmHead);
  std::fill_n(dx_.data(), tokens_ * hidden_, 0.0f);
  layers_.norm_backward({.rows = tokens_,
                         .width = hidden_,
                         .x = output_.data(),
                         .rstd = output_rstd_.data(),
                         .weight = weights.final_norm(),
                         .dout = dnormed_.data(),
                         .dx = dx_.data(),
                         .dweight = gradient.final_norm()});
  tell(ready, Component::kFinalNorm, Component::kFinalNorm);
  const int last = layout_.config().layers - 1;
  for (int i = last; i >= 0; --i) {
    // The memory that blocks share still holds the last one.
    if (recompute_ && i < last)
      forward_block(i, weights.block(i), inputs_[index_of(i)].data(), nullptr);
    backward_mlp(i, weights.block(i), gradient.block(i), ready);
    backward_attention(i, weights.block(i), gradient.block(i), ready);
  }
  layers_.embed_backward(batch.tokens, dx_.data(), tied, gradient.embedding());
  tell(ready, Component::kEmbedding, Component::kEmbedding);
  return sum;
}

void Passes::backward_mlp(int index, const Parameters& weights, const Gradients& gradient,
                          const RangeReady& ready) {
  BlockMemory& block = memory(index);
  layers_.linear_backward(size(intermediate_, hidden_), dx_.data(), weights.down, dact_.data());
  layers_.swiglu_backward({.rows = tokens_,
                           .width = intermediate_,
                           .gate_up = block.gate_up.data(),
                           .dact = dact_.data(),
                           .act = act_.data()});
  const float* dgate_up = block.gate_up.data();
  layers_.linear_weights(size(intermediate_, hidden_), dx_.data(), act_.data(), false,
                         gradient.down);
  tell(ready, Component::kDown, Component::kDown, index);
  layers_.linear_weights(size(hidden_, 2 * intermediate_), dgate_up, block.normed_middle.data(),
                         false, gradient.gate_up);
  tell(ready, Component::kGate, Component::kUp, index);
  layers_.linear_backward(size(hidden_, 2 * intermediate_), dgate_up, weights.gate_up,
                          dnormed_.data());
  layers_.norm_backward({.rows = tokens_,
                         .width = hidden_,
                         .x = block.middle.data(),
                         .rstd = block.middle_rstd.data(),
                         .weight = weights.post_attention_norm,
                         .dout = dnormed_.data(),
                         .dx = dx_.data(),
                         .dweight = gradient.post_attention_norm});
  tell(ready, Component::kPostAttentionNorm, Component::kPostAttentionNorm, index);
}

void Passes::backward_attention(int index, const Parameters& weights, const Gradients& gradient,
                                const RangeReady& ready) {
  BlockMemory& block = memory(index);
  layers_.linear_weights(size(hidden_, hidden_), dx_.data(), block.attended.data(), false,
                         gradient.output);
  tell(ready, Component::kOutput, Component::kOutput, index);
  float* dattended = dnormed_.data();
  layers_.linear_backward(size(hidden_, hidden_), dx_.data(), weights.output, dattended);
  layers_.attention_backward(rows_, context_, block.qkv.data(), block.attended.data(),
                             block.lse.data(), dattended, dqkv_.data());
  layers_.linear_weights(size(hidden_, qkv_width_), dqkv_.data(), block.normed_input.data(), false,
                         gradient.qkv);
  tell(ready, Component::kQuery, Component::kValue, index);
  layers_.linear_backward(size(hidden_, qkv_width_), dqkv_.data(), weights.qkv, dnormed_.data());
  layers_.norm_backward({.rows = tokens_,
                         .width = hidden_,
                         .x = inputs_[index_of(index)].data(),
                         .rstd = block.input_rstd.data(),
                         .weight = weights.input_norm,
                         .dout = dnormed_.data(),
                         .dx = dx_.data(),
                         .dweight = gradient.input_norm});
  tell(ready, Component::kInputNorm, Component::kInputNorm, index);
}

void Passes::tell(const RangeReady& ready, Component first, Component last, int block) const {
  if (ready) ready({layout_.range(first, block).begin, layout_.range(last, block).end});
}

}  // namespace lockstep
