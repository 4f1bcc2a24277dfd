#include "lockstep/model/cuda/passes.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "lockstep/base/cuda/runtime.h"
#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/base/log.h"
#include "lockstep/model/cuda/kernels.h"
#include "lockstep/model/cuda/products.h"
#include "lockstep/model/gpu_memory.h"
#include "lockstep/model/weights.h"

namespace lockstep {
namespace {

using Kind = CudaProducts::Kind;

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

template <typename T>
class Passes final : public CudaPasses {
 public:
  Passes(const ParameterLayout& layout, const Options& options);

  void loss(const CudaParameters& parameters, const CudaBatch& batch, cudaStream_t stream) override;
  const void* logits(const CudaParameters& parameters, const CudaBatch& batch, std::size_t place,
                     cudaStream_t stream) override;
  void gradient(const CudaParameters& parameters, const CudaBatch& batch, float* gradient,
                const Hooks& hooks, cudaStream_t stream) override;
  void embedding_gradient(const CudaBatch& batch, float* gradient, cudaStream_t stream) override;
  const void* loss_total() const override { return total_.data(); }
  std::size_t bytes() const override { return bytes_; }

 private:
  // What the backward pass needs from a block; one row per token.
  struct BlockMemory {
    T *input, *normed_input, *qkv, *attended, *middle, *normed_middle, *gate_up, *act;
    float *input_rstd, *middle_rstd, *lse;
  };
  struct Parameters {
    Weights<const T> matrices;
    Weights<const float> norms;
  };

  Parameters parameters(const CudaParameters& given) const {
    return {{layout_, static_cast<const T*>(sizeof(T) == 4 ? given.master : given.rounded)},
            {layout_, given.master}};
  }
  template <typename Value>
  Value* take(std::size_t count, const char* purpose) {
    memory_.emplace_back(count * sizeof(Value), purpose);
    bytes_ += memory_.back().bytes();
    return static_cast<Value*>(memory_.back().data());
  }
  void choose_attention();
  BlockMemory take_block(T* input);

  void forward(const Parameters& weights, const CudaBatch& batch);
  void forward_block(int index, const Parameters& weights, T* out);
  void forward_attention(int index, const Parameters& weights);
  void forward_gates(int index, const Parameters& weights);
  void compute_logits(const Parameters& weights, std::size_t begin);
  void heads(const Parameters& weights, const CudaBatch& batch, float* dlm_head);
  void backward_mlp(int index, const Parameters& weights, const Weights<float>& gradient,
                    const Hooks& hooks);
  void backward_attention(int index, const Parameters& weights, const Weights<float>& gradient,
                          const Hooks& hooks);
  void norm(const T* x, const float* weight, T* out, float* rstd);
  void norm_backward(const T* x, const float* rstd, const float* weight, bool first,
                     float* dweight);
  void linear(std::size_t ins, std::size_t outs, const T* x, const T* w, const T* add, T* out);
  void linear_inputs(std::size_t ins, std::size_t outs, const T* dy, const T* w, T* dx);
  void linear_weights(std::size_t ins, std::size_t outs, const T* dy, const T* x, float* dw);
  void rotate(T* values, bool inverse);
  void tell(const Hooks& hooks, Component first, Component last, int block = -1) const;

  const ParameterLayout& layout_;
  const bool recompute_;
  const std::size_t rows_, context_, tokens_;
  const std::size_t hidden_, qkv_width_, intermediate_, vocab_, logits_stride_, chunk_;
  const CudaAttentionShape shape_;
  CudaProducts products_;
  std::optional<CudnnAttention> cudnn_;
  cudaStream_t stream_ = nullptr;  // of the call under way

  std::vector<DeviceMemory> memory_;
  std::size_t bytes_ = 0;
  std::vector<BlockMemory> blocks_;
  T *output_, *normed_output_;
  float* output_rstd_;
  T *dx_, *dnormed_, *dact_, *dqkv_;
  void* scratch_;  // of attention; logits while the heads are at work
  float *delta_, *norm_scratch_, *losses_, *cos_, *sin_;
  std::uint8_t* correct_;
  DeviceArray<cuda::LossTotal> total_;
};

template <typename T>
Passes<T>::Passes(const ParameterLayout& layout, const Options& options)
    : layout_(layout),
      recompute_(options.recompute),
      rows_(static_cast<std::size_t>(options.rows)),
      context_(static_cast<std::size_t>(options.context)),
      tokens_(rows_ * context_),
      hidden_(static_cast<std::size_t>(layout.config().hidden)),
      qkv_width_(hidden_ + 2 * static_cast<std::size_t>(layout.config().kv_hidden())),
      intermediate_(static_cast<std::size_t>(layout.config().intermediate)),
      vocab_(static_cast<std::size_t>(layout.config().vocab)),
      logits_stride_(round_up(vocab_, 8)),
      chunk_(logits_chunk(tokens_, vocab_, sizeof(T))),
      shape_{rows_, context_, static_cast<std::size_t>(layout.config().heads),
             static_cast<std::size_t>(layout.config().kv_heads),
             static_cast<std::size_t>(layout.config().head_dim())},
      products_(options.precision),
      total_(1, "the loss") {
  if (sizeof(T) == 2 && !options.plain_attention) choose_attention();
  const std::size_t scratch = std::max(chunk_ * logits_stride_ * sizeof(T),
                                       cudnn_ ? cudnn_->workspace_bytes() : std::size_t{0});
  scratch_ = take<std::byte>(scratch, "logits and attention");
  output_ = take<T>(tokens_ * hidden_, "activations");
  normed_output_ = take<T>(tokens_ * hidden_, "activations");
  output_rstd_ = take<float>(tokens_, "activations");
  dx_ = take<T>(tokens_ * hidden_, "gradients of activations");
  dnormed_ = take<T>(tokens_ * hidden_, "gradients of activations");
  dact_ = take<T>(tokens_ * intermediate_, "gradients of activations");
  dqkv_ = take<T>(tokens_ * qkv_width_, "gradients of activations");
  delta_ = take<float>(tokens_ * shape_.heads, "attention");
  norm_scratch_ = take<float>(cuda::norm_scratch(hidden_), "norms");
  losses_ = take<float>(tokens_, "losses");
  correct_ = take<std::uint8_t>(tokens_, "losses");
  for (int i = 0; i < layout.config().layers; ++i) {
    T* input = take<T>(tokens_ * hidden_, "activations");
    if (i > 0 && recompute_) {
      blocks_.push_back(blocks_.front());
      blocks_.back().input = input;
    } else {
      blocks_.push_back(take_block(input));
    }
  }

  const RotationAngles angles = rotation_angles(layout.config(), context_);
  cos_ = take<float>(angles.cos.size(), "angles");
  sin_ = take<float>(angles.sin.size(), "angles");
  const std::size_t bytes = angles.cos.size() * sizeof(float);
  check_cuda(cudaMemcpy(cos_, angles.cos.data(), bytes, cudaMemcpyDefault), "copying angles");
  check_cuda(cudaMemcpy(sin_, angles.sin.data(), bytes, cudaMemcpyDefault), "copying angles");
}

// cuDNN's, where it has one for this GPU and shape; else ours, which any GPU runs.
template <typename T>
void Passes<T>::choose_attention() {
  try {
    cudnn_.emplace(shape_);
  } catch (const Error& error) {
    log(LogLevel::kInfo, "attention runs in kernels of our own, slower than cuDNN's: {}",
        error.message());
  }
}

template <typename T>
typename Passes<T>::BlockMemory Passes<T>::take_block(T* input) {
  const auto wide = [this](std::size_t width) { return take<T>(tokens_ * width, "activations"); };
  return {.input = input,
          .normed_input = wide(hidden_),
          .qkv = wide(qkv_width_),
          .attended = wide(hidden_),
          .middle = wide(hidden_),
          .normed_middle = wide(hidden_),
          .gate_up = wide(2 * intermediate_),
          .act = wide(intermediate_),
          .input_rstd = take<float>(tokens_, "activations"),
          .middle_rstd = take<float>(tokens_, "activations"),
          .lse = take<float>(tokens_ * shape_.heads, "activations")};
}

template <typename T>
void Passes<T>::norm(const T* x, const float* weight, T* out, float* rstd) {
  cuda::norm_forward(tokens_, hidden_, x, weight, layout_.config().norm_eps, out, rstd, stream_);
}

// dx_ = (or +=) the gradient of dnormed_ through the norm.
template <typename T>
void Passes<T>::norm_backward(const T* x, const float* rstd, const float* weight, bool first,
                              float* dweight) {
  cuda::norm_backward<T>({.rows = tokens_,
                          .width = hidden_,
                          .x = x,
                          .rstd = rstd,
                          .weight = weight,
                          .dout = dnormed_,
                          .before = first ? nullptr : dx_,
                          .dx = dx_,
                          .dweight = dweight,
                          .scratch = norm_scratch_},
                         stream_);
}

template <typename T>
void Passes<T>::linear(std::size_t ins, std::size_t outs, const T* x, const T* w, const T* add,
                       T* out) {
  products_({Kind::kForward, tokens_, ins, outs, x, w, out, add}, stream_);
}

template <typename T>
void Passes<T>::linear_inputs(std::size_t ins, std::size_t outs, const T* dy, const T* w, T* dx) {
  products_({Kind::kInputs, tokens_, ins, outs, dy, w, dx}, stream_);
}

template <typename T>
void Passes<T>::linear_weights(std::size_t ins, std::size_t outs, const T* dy, const T* x,
                               float* dw) {
  products_({Kind::kWeights, tokens_, ins, outs, dy, x, dw}, stream_);
}

template <typename T>
void Passes<T>::rotate(T* values, bool inverse) {
  cuda::rotate({.tokens = tokens_,
                .context = context_,
                .heads = shape_.heads + shape_.kv_heads,
                .head_dim = shape_.head_dim,
                .stride = qkv_width_,
                .cos = cos_,
                .sin = sin_,
                .inverse = inverse},
               values, stream_);
}

template <typename T>
void Passes<T>::forward_attention(int index, const Parameters& weights) {
  const BlockMemory& block = blocks_[index_of(index)];
  const auto matrices = weights.matrices.block(index);
  norm(block.input, weights.norms.block(index).input_norm, block.normed_input, block.input_rstd);
  linear(hidden_, qkv_width_, block.normed_input, matrices.qkv, nullptr, block.qkv);
  rotate(block.qkv, false);
  if (cudnn_) {
    cudnn_->forward(block.qkv, block.attended, block.lse, scratch_, stream_);
  } else {
    cuda::attention_forward(shape_, block.qkv, block.attended, block.lse, stream_);
  }
  linear(hidden_, hidden_, block.attended, matrices.output, block.input, block.middle);
}

template <typename T>
void Passes<T>::forward_gates(int index, const Parameters& weights) {
  const BlockMemory& block = blocks_[index_of(index)];
  norm(block.middle, weights.norms.block(index).post_attention_norm, block.normed_middle,
       block.middle_rstd);
  linear(hidden_, 2 * intermediate_, block.normed_middle, weights.matrices.block(index).gate_up,
         nullptr, block.gate_up);
}

template <typename T>
void Passes<T>::forward_block(int index, const Parameters& weights, T* out) {
  const BlockMemory& block = blocks_[index_of(index)];
  forward_attention(index, weights);
  forward_gates(index, weights);
  cuda::swiglu_forward(tokens_, intermediate_, block.gate_up, block.act, stream_);
  linear(intermediate_, hidden_, block.act, weights.matrices.block(index).down, block.middle, out);
}

template <typename T>
void Passes<T>::forward(const Parameters& weights, const CudaBatch& batch) {
  cuda::embed(tokens_, hidden_, batch.tokens, weights.matrices.embedding(), blocks_.front().input,
              stream_);
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    forward_block(static_cast<int>(i), weights,
                  i + 1 < blocks_.size() ? blocks_[i + 1].input : output_);
  }
  norm(output_, weights.norms.final_norm(), normed_output_, output_rstd_);
}

// Those of the chunk that begins with token `begin`, into scratch_.
template <typename T>
void Passes<T>::compute_logits(const Parameters& weights, std::size_t begin) {
  products_({Kind::kForward, std::min(chunk_, tokens_ - begin), hidden_, vocab_,
             normed_output_ + begin * hidden_, weights.matrices.lm_head(), scratch_, nullptr,
             logits_stride_},
            stream_);
}

// The lm_head and the loss, chunk by chunk: logits, their gradients in the same memory, and what
// follows from them before the next chunk.
template <typename T>
void Passes<T>::heads(const Parameters& weights, const CudaBatch& batch, float* dlm_head) {
  T* logits = static_cast<T*>(scratch_);
  const T* lm_head = weights.matrices.lm_head();
  for (std::size_t begin = 0; begin < tokens_; begin += chunk_) {
    const std::size_t count = std::min(chunk_, tokens_ - begin);
    const T* normed = normed_output_ + begin * hidden_;
    compute_logits(weights, begin);
    cuda::cross_entropy(count, vocab_, logits_stride_, logits, batch.targets + begin,
                        dlm_head != nullptr, losses_ + begin, correct_ + begin, stream_);
    if (dlm_head == nullptr) continue;
    products_({Kind::kInputs, count, hidden_, vocab_, logits, lm_head, dnormed_ + begin * hidden_,
               nullptr, logits_stride_},
              stream_);
    products_({Kind::kWeights, count, hidden_, vocab_, logits, normed, dlm_head,
               begin > 0 ? dlm_head : nullptr, logits_stride_},
              stream_);
  }
  cuda::sum_losses(tokens_, losses_, correct_, batch.targets, total_.data(), stream_);
}

template <typename T>
void Passes<T>::loss(const CudaParameters& given, const CudaBatch& batch, cudaStream_t stream) {
  stream_ = stream;
  const Parameters weights = parameters(given);
  forward(weights, batch);
  heads(weights, batch, nullptr);
}

template <typename T>
const void* Passes<T>::logits(const CudaParameters& given, const CudaBatch& batch,
                              std::size_t place, cudaStream_t stream) {
  stream_ = stream;
  const Parameters weights = parameters(given);
  forward(weights, batch);
  const std::size_t begin = place / chunk_ * chunk_;
  compute_logits(weights, begin);
  return static_cast<const T*>(scratch_) + (place - begin) * logits_stride_;
}

template <typename T>
void Passes<T>::gradient(const CudaParameters& given, const CudaBatch& batch, float* flat,
                         const Hooks& hooks, cudaStream_t stream) {
  stream_ = stream;
  const Parameters weights = parameters(given);
  const Weights<float> gradient(layout_, flat);
  forward(weights, batch);
  if (hooks.forward_done) hooks.forward_done();
  heads(weights, batch, gradient.lm_head());
  if (!layout_.config().tie_embeddings) {
    tell(hooks, Component::kLmHead, Component::kLmHead);
  }
  norm_backward(output_, output_rstd_, weights.norms.final_norm(), true, gradient.final_norm());
  tell(hooks, Component::kFinalNorm, Component::kFinalNorm);
  for (int i = layout_.config().layers - 1; i >= 0; --i) {
    if (recompute_) {
      forward_attention(i, weights);
      forward_gates(i, weights);
    }
    backward_mlp(i, weights, gradient, hooks);
    backward_attention(i, weights, gradient, hooks);
  }
}

template <typename T>
void Passes<T>::embedding_gradient(const CudaBatch& batch, float* flat, cudaStream_t stream) {
  cuda::embed_backward(vocab_, hidden_, batch.token_begin, batch.token_places, dx_,
                       layout_.config().tie_embeddings, Weights<float>(layout_, flat).embedding(),
                       stream);
}

template <typename T>
void Passes<T>::backward_mlp(int index, const Parameters& weights, const Weights<float>& gradient,
                             const Hooks& hooks) {
  const BlockMemory& block = blocks_[index_of(index)];
  const auto matrices = weights.matrices.block(index);
  const auto out = gradient.block(index);
  linear_inputs(intermediate_, hidden_, dx_, matrices.down, dact_);
  cuda::swiglu_backward(tokens_, intermediate_, block.gate_up, dact_,
                        recompute_ ? block.act : nullptr, stream_);
  const T* dgate_up = block.gate_up;
  linear_weights(intermediate_, hidden_, dx_, block.act, out.down);
  tell(hooks, Component::kDown, Component::kDown, index);
  linear_weights(hidden_, 2 * intermediate_, dgate_up, block.normed_middle, out.gate_up);
  tell(hooks, Component::kGate, Component::kUp, index);
  linear_inputs(hidden_, 2 * intermediate_, dgate_up, matrices.gate_up, dnormed_);
  norm_backward(block.middle, block.middle_rstd, weights.norms.block(index).post_attention_norm,
                false, out.post_attention_norm);
  tell(hooks, Component::kPostAttentionNorm, Component::kPostAttentionNorm, index);
}

template <typename T>
void Passes<T>::backward_attention(int index, const Parameters& weights,
                                   const Weights<float>& gradient, const Hooks& hooks) {
  const BlockMemory& block = blocks_[index_of(index)];
  const auto matrices = weights.matrices.block(index);
  const auto out = gradient.block(index);
  linear_weights(hidden_, hidden_, dx_, block.attended, out.output);
  tell(hooks, Component::kOutput, Component::kOutput, index);
  T* dattended = dnormed_;
  linear_inputs(hidden_, hidden_, dx_, matrices.output, dattended);
  if (cudnn_) {
    cudnn_->backward(block.qkv, block.attended, block.lse, dattended, dqkv_, scratch_, stream_);
  } else {
    cuda::attention_backward(shape_, block.qkv, block.attended, block.lse, dattended, delta_, dqkv_,
                             stream_);
  }
  rotate(dqkv_, true);
  linear_weights(hidden_, qkv_width_, dqkv_, block.normed_input, out.qkv);
  tell(hooks, Component::kQuery, Component::kValue, index);
  linear_inputs(hidden_, qkv_width_, dqkv_, matrices.qkv, dnormed_);
  norm_backward(block.input, block.input_rstd, weights.norms.block(index).input_norm, false,
                out.input_norm);
  tell(hooks, Component::kInputNorm, Component::kInputNorm, index);
}

template <typename T>
void Passes<T>::tell(const Hooks& hooks, Component first, Component last, int block) const {
  if (hooks.range_done) {
    hooks.range_done({layout_.range(first, block).begin, layout_.range(last, block).end});
  }
}

}  // namespace

// As many as fit, in even parts.
std::size_t logits_chunk(std::size_t tokens, std::size_t vocab, std::size_t element_bytes) {
  const std::size_t most =
      std::max<std::size_t>(256, kGpuScratch / (round_up(vocab, 8) * element_bytes));
  const std::size_t chunks = (tokens + most - 1) / most;
  return std::min(tokens, round_up((tokens + chunks - 1) / chunks, 256));
}

std::unique_ptr<CudaPasses> make_cuda_passes(const ParameterLayout& layout,
                                             const CudaPasses::Options& options) {
  if (options.precision == Precision::kBf16) {
    return std::make_unique<Passes<__nv_bfloat16>>(layout, options);
  }
  return std::make_unique<Passes<float>>(layout, options);
}

}  // namespace lockstep
