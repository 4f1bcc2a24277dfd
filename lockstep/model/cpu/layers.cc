#include "lockstep/model/cpu/layers.h"

#include <algorithm>
#include <cmath>

#include "lockstep/base/index.h"
#include "lockstep/model/batch.h"

namespace lockstep {
namespace {

constexpr std::size_t kRun = 32;       // tokens of one task, and of one partial sum
constexpr std::size_t kVocabRun = 64;  // vocabulary entries of one task

}  // namespace

Layers::Layers(const ModelConfig& config, Precision precision, ThreadPool& pool,
               std::size_t max_tokens, std::size_t max_context)
    : config_(config),
      pool_(pool),
      matmul_(pool, precision),
      kernels_(best_model_kernels()),
      attention_forward_(kernels_.attention_forward),
      attention_backward_(kernels_.attention_backward),
      angles_(rotation_angles(config, max_context)),
      norm_partials_((max_tokens + kRun - 1) / kRun * static_cast<std::size_t>(config.hidden)),
      token_begin_(static_cast<std::size_t>(config.vocab) + 1),
      token_places_(max_tokens) {
  const auto head_dim = static_cast<std::size_t>(config.head_dim());
  std::size_t scratch = attention_scratch(max_context, head_dim);
  if (precision == Precision::kBf16 && bf16_attention() != nullptr) {
    attention_forward_ = bf16_attention()->forward;
    attention_backward_ = bf16_attention()->backward;
    scratch = bf16_attention_scratch(max_context, head_dim);
  }
  for (int worker = 0; worker < pool.threads(); ++worker) scratch_.emplace_back(scratch);
}

template <typename Body>
void Layers::for_rows(std::size_t rows, Body&& body) {
  pool_.run((rows + kRun - 1) / kRun,
            [&](std::size_t run) { body(run * kRun, std::min(kRun, rows - run * kRun)); });
}

void Layers::embed(std::span<const std::int32_t> tokens, const float* embedding, float* x) {
  const auto hidden = static_cast<std::size_t>(config_.hidden);
  for_rows(tokens.size(), [&](std::size_t begin, std::size_t count) {
    for (std::size_t i = begin; i < begin + count; ++i) {
      std::copy_n(embedding + static_cast<std::size_t>(tokens[i]) * hidden, hidden, x + i * hidden);
    }
  });
}

void Layers::embed_backward(std::span<const std::int32_t> tokens, const float* dx, bool add,
                            float* dembedding) {
  index_tokens(tokens, token_begin_, token_places_);
  const auto vocab = static_cast<std::size_t>(config_.vocab);
  const auto hidden = static_cast<std::size_t>(config_.hidden);
  pool_.run((vocab + kVocabRun - 1) / kVocabRun, [&](std::size_t run) {
    for (std::size_t token = run * kVocabRun; token < std::min(vocab, (run + 1) * kVocabRun);
         ++token) {
      float* out = dembedding + token * hidden;
      if (!add) std::fill_n(out, hidden, 0.0f);
      for (std::uint32_t i = token_begin_[token]; i < token_begin_[token + 1]; ++i) {
        kernels_.add_rows(1, hidden, dx + token_places_[i] * hidden, hidden, out);
      }
    }
  });
}

void Layers::norm(const NormForward& call) {
  for_rows(call.rows, [&](std::size_t begin, std::size_t count) {
    NormForward part = call;
    part.rows = count;
    part.x += begin * call.width;
    part.out += begin * call.width;
    part.rstd += begin;
    if (call.y != nullptr) {
      part.y += begin * call.width;
      part.sum += begin * call.width;
    }
    kernels_.norm_forward(part);
  });
}

void Layers::norm_backward(const NormBackward& call) {
  for_rows(call.rows, [&](std::size_t begin, std::size_t count) {
    NormBackward part = call;
    part.rows = count;
    part.x += begin * call.width;
    part.rstd += begin;
    part.dout += begin * call.width;
    part.dx += begin * call.width;
    part.dweight = norm_partials_.data() + begin / kRun * call.width;
    std::fill_n(part.dweight, call.width, 0.0f);
    kernels_.norm_backward(part);
  });
  std::fill_n(call.dweight, call.width, 0.0f);
  kernels_.add_rows((call.rows + kRun - 1) / kRun, call.width, norm_partials_.data(), call.width,
                    call.dweight);
}

void Layers::swiglu(const SwigluForward& call) {
  for_rows(call.rows, [&](std::size_t begin, std::size_t count) {
    kernels_.swiglu_forward({.rows = count,
                             .width = call.width,
                             .gate_up = call.gate_up + begin * 2 * call.width,
                             .act = call.act + begin * call.width});
  });
}

void Layers::swiglu_backward(const SwigluBackward& call) {
  for_rows(call.rows, [&](std::size_t begin, std::size_t count) {
    kernels_.swiglu_backward({.rows = count,
                              .width = call.width,
                              .gate_up = call.gate_up + begin * 2 * call.width,
                              .dact = call.dact + begin * call.width,
                              .act = call.act + begin * call.width});
  });
}

void Layers::cross_entropy(const CrossEntropy& call) {
  constexpr std::size_t kRows = 4;  // they are long
  pool_.run((call.rows + kRows - 1) / kRows, [&](std::size_t task) {
    const std::size_t begin = task * kRows;
    kernels_.cross_entropy({.rows = std::min(kRows, call.rows - begin),
                            .width = call.width,
                            .logits = call.logits + begin * call.width,
                            .targets = call.targets + begin,
                            .gradient = call.gradient,
                            .loss = call.loss + begin,
                            .correct = call.correct + begin});
  });
}

void Layers::linear(const Linear& size, const float* x, const float* w, float* y) {
  matmul_({.rows = size.tokens,
           .cols = size.out,
           .depth = size.in,
           .a = {x, size.in},
           .b = {w, size.in, true},
           .out = y,
           .out_stride = size.out});
}

void Layers::linear_backward(const Linear& size, const float* dy, const float* w, float* dx) {
  matmul_({.rows = size.tokens,
           .cols = size.in,
           .depth = size.out,
           .a = {dy, size.out},
           .b = {w, size.in},
           .out = dx,
           .out_stride = size.in});
}

void Layers::linear_weights(const Linear& size, const float* dy, const float* x, bool add,
                            float* dw) {
  matmul_({.rows = size.out,
           .cols = size.in,
           .depth = size.tokens,
           .a = {dy, size.out, true},
           .b = {x, size.in},
           .out = dw,
           .out_stride = size.in,
           .add = add ? dw : nullptr});
}

AttentionShape Layers::shape(std::size_t queries) const {
  const auto hidden = static_cast<std::size_t>(config_.hidden);
  const std::size_t stride = hidden + 2 * static_cast<std::size_t>(config_.kv_hidden());
  return {.first = 0,
          .queries = queries,
          .group = static_cast<std::size_t>(config_.heads / config_.kv_heads),
          .head_dim = static_cast<std::size_t>(config_.head_dim()),
          .q_stride = stride,
          .kv_stride = stride,
          .out_stride = hidden,
          .cos = angles_.cos.data(),
          .sin = angles_.sin.data()};
}

void Layers::attention(std::size_t rows, std::size_t context, const float* qkv, float* out,
                       float* lse) {
  const AttentionShape whole = shape(context);
  const auto kv_heads = static_cast<std::size_t>(config_.kv_heads);
  const auto hidden = static_cast<std::size_t>(config_.hidden);
  pool_.run(rows * kv_heads, [&](std::size_t task, int worker) {
    const std::size_t first = task / kv_heads * context;
    const std::size_t head = task % kv_heads;
    const float* row = qkv + first * whole.q_stride;
    const float* k = row + hidden + head * whole.head_dim;
    const std::size_t q_offset = head * whole.group * whole.head_dim;
    attention_forward_({.shape = whole,
                        .q = row + q_offset,
                        .k = k,
                        .v = k + kv_heads * whole.head_dim,
                        .out = out + first * hidden + q_offset,
                        .lse = lse + task * whole.group * context,
                        .scratch = scratch_[index_of(worker)].data()});
  });
}

void Layers::attention_backward(std::size_t rows, std::size_t context, const float* qkv,
                                const float* out, const float* lse, const float* dout,
                                float* dqkv) {
  const AttentionShape whole = shape(context);
  const auto kv_heads = static_cast<std::size_t>(config_.kv_heads);
  const auto hidden = static_cast<std::size_t>(config_.hidden);
  pool_.run(rows * kv_heads, [&](std::size_t task, int worker) {
    const std::size_t first = task / kv_heads * context;
    const std::size_t head = task % kv_heads;
    const std::size_t q_offset = first * whole.q_stride + head * whole.group * whole.head_dim;
    const std::size_t k_offset = first * whole.q_stride + hidden + head * whole.head_dim;
    const std::size_t v_offset = k_offset + kv_heads * whole.head_dim;
    const std::size_t out_offset = first * hidden + head * whole.group * whole.head_dim;
    attention_backward_({.shape = whole,
                         .q = qkv + q_offset,
                         .k = qkv + k_offset,
                         .v = qkv + v_offset,
                         .out = out + out_offset,
                         .lse = lse + task * whole.group * context,
                         .dout = dout + out_offset,
                         .dq = dqkv + q_offset,
                         .dk = dqkv + k_offset,
                         .dv = dqkv + v_offset,
                         .scratch = scratch_[index_of(worker)].data()});
  });
}

void Layers::attend_cache(std::size_t first, std::size_t queries, const float* qkv,
                          const float* cache, float* out, float* lse) {
  AttentionShape part = shape(queries);
  const auto kv_hidden = static_cast<std::size_t>(config_.kv_hidden());
  part.first = first;
  part.kv_stride = 2 * kv_hidden;
  pool_.run(static_cast<std::size_t>(config_.kv_heads), [&](std::size_t head, int worker) {
    const std::size_t q_offset = head * part.group * part.head_dim;
    const float* k = cache + head * part.head_dim;
    attention_forward_({.shape = part,
                        .q = qkv + q_offset,
                        .k = k,
                        .v = k + kv_hidden,
                        .out = out + q_offset,
                        .lse = lse + head * part.group * queries,
                        .scratch = scratch_[index_of(worker)].data()});
  });
}

}  // namespace lockstep
