#include "lockstep/model/cuda/cudnn_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "lockstep/base/cuda/runtime.h"
#include "lockstep/base/error.h"
#include "lockstep/model/cuda/cudnn_graph.h"

namespace lockstep {
namespace {

enum Id : std::int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kLse,
  kScale,
  kHidden,
  kOne,
  kDout,
  kDelta,
  kDq,
  kDk,
  kDv
};

constexpr cudnnDataType_t kBf16 = CUDNN_DATA_BFLOAT16;
constexpr cudnnDataType_t kF32 = CUDNN_DATA_FLOAT;

// The sizes and strides of all tensors, in cuDNN's order: sequence, head, token, element.
struct Sizes {
  explicit Sizes(const CudaAttentionShape& shape)
      : rows(static_cast<std::int64_t>(shape.rows)),
        heads(static_cast<std::int64_t>(shape.heads)),
        kv_heads(static_cast<std::int64_t>(shape.kv_heads)),
        context(static_cast<std::int64_t>(shape.context)),
        width(static_cast<std::int64_t>(shape.head_dim)),
        qkv(static_cast<std::int64_t>(shape.qkv_width())) {}

  std::int64_t rows, heads, kv_heads, context, width, qkv;

  CudnnDims q() const { return {rows, heads, context, width}; }
  CudnnDims kv() const { return {rows, kv_heads, context, width}; }
  CudnnDims kv_transposed() const { return {rows, kv_heads, width, context}; }
  CudnnDims packed() const { return {context * qkv, width, qkv, 1}; }
  CudnnDims packed_transposed() const { return {context * qkv, width, 1, qkv}; }
  CudnnDims out() const { return {context * heads * width, width, heads * width, 1}; }
  CudnnDims scores() const { return {rows, heads, context, context}; }
  CudnnDims scores_strides() const {
    return {heads * context * context, context * context, context, 1};
  }
  CudnnDims scores_transposed() const {
    return {heads * context * context, context * context, 1, context};
  }
  CudnnDims per_token() const { return {rows, heads, context, 1}; }
  CudnnDims per_token_strides() const { return {heads * context, context, 1, 1}; }
  CudnnDims per_element_strides() const {
    return {heads * context * width, context * width, width, 1};
  }
};

CudnnGraph::Tensor score(CudnnGraph& graph, const Sizes& sizes, cudnnDataType_t type = kF32) {
  return graph.inner(type, sizes.scores(), sizes.scores_strides());
}

// A token sees itself and those before it.
CudnnGraph::Tensor hide_later(CudnnGraph& graph, const Sizes& sizes, CudnnGraph::Tensor scores) {
  const auto row = score(graph, sizes, CUDNN_DATA_INT32);
  const auto column = score(graph, sizes, CUDNN_DATA_INT32);
  const auto seen = score(graph, sizes, CUDNN_DATA_BOOLEAN);
  const auto masked = score(graph, sizes);
  graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, scores, nullptr, row, nullptr, kF32, 2);
  graph.pointwise(CUDNN_POINTWISE_GEN_INDEX, scores, nullptr, column, nullptr, kF32, 3);
  graph.pointwise(CUDNN_POINTWISE_CMP_GE, row, column, seen, nullptr, CUDNN_DATA_BOOLEAN);
  graph.pointwise(CUDNN_POINTWISE_BINARY_SELECT, scores, graph.scalar(kHidden), masked, seen);
  return masked;
}

void describe_forward(CudnnGraph& graph, const Sizes& sizes) {
  const auto q = graph.in_memory(kQ, kBf16, sizes.q(), sizes.packed());
  const auto k = graph.in_memory(kK, kBf16, sizes.kv_transposed(), sizes.packed_transposed());
  const auto v = graph.in_memory(kV, kBf16, sizes.kv(), sizes.packed());
  const auto out = graph.in_memory(kOut, kBf16, sizes.q(), sizes.out());
  const auto lse = graph.in_memory(kLse, kF32, sizes.per_token(), sizes.per_token_strides());
  const auto per_token = [&] {
    return graph.inner(kF32, sizes.per_token(), sizes.per_token_strides());
  };

  const auto raw = score(graph, sizes);
  const auto scaled = score(graph, sizes);
  graph.product(q, k, raw);
  graph.pointwise(CUDNN_POINTWISE_MUL, raw, graph.scalar(kScale), scaled);
  const auto masked = hide_later(graph, sizes, scaled);

  const auto highest = per_token();
  const auto shifted = score(graph, sizes);
  const auto weight = score(graph, sizes);
  const auto total = per_token();
  const auto log_total = per_token();
  const auto share = score(graph, sizes, kBf16);
  graph.reduce(CUDNN_REDUCE_TENSOR_MAX, masked, highest);
  graph.pointwise(CUDNN_POINTWISE_SUB, masked, highest, shifted);
  graph.pointwise(CUDNN_POINTWISE_EXP, shifted, nullptr, weight);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, weight, total);
  graph.pointwise(CUDNN_POINTWISE_LOG, total, nullptr, log_total);
  graph.pointwise(CUDNN_POINTWISE_ADD, highest, log_total, lse);
  graph.pointwise(CUDNN_POINTWISE_DIV, weight, total, share);
  graph.product(share, v, out);
}

// The gradient of the sum over a group of heads that share keys or values.
void product_per_group(CudnnGraph& graph, const Sizes& sizes, CudnnGraph::Tensor a,
                       CudnnGraph::Tensor b, CudnnGraph::Tensor out) {
  if (sizes.heads == sizes.kv_heads) {
    graph.product(a, b, out);
    return;
  }
  const auto every_head = graph.inner(kBf16, sizes.q(), sizes.per_element_strides());
  graph.product(a, b, every_head);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, every_head, out);
}

// dq is a product of its own over all keys, not a sum that kernels add to as they come by: that is
// cuDNN's deterministic algorithm.
void describe_backward(CudnnGraph& graph, const Sizes& sizes) {
  const auto q = graph.in_memory(kQ, kBf16, sizes.q(), sizes.packed());
  const auto k = graph.in_memory(kK, kBf16, sizes.kv_transposed(), sizes.packed_transposed());
  const auto v = graph.in_memory(kV, kBf16, sizes.kv_transposed(), sizes.packed_transposed());
  const auto out = graph.in_memory(kOut, kBf16, sizes.q(), sizes.out());
  const auto dout = graph.in_memory(kDout, kBf16, sizes.q(), sizes.out());
  const auto lse = graph.in_memory(kLse, kF32, sizes.per_token(), sizes.per_token_strides());
  const auto delta = graph.in_memory(kDelta, kF32, sizes.per_token(), sizes.per_token_strides());
  const auto dq = graph.in_memory(kDq, kBf16, sizes.q(), sizes.packed());
  const auto dk = graph.in_memory(kDk, kBf16, sizes.kv(), sizes.packed());
  const auto dv = graph.in_memory(kDv, kBf16, sizes.kv(), sizes.packed());
  const auto scale = graph.scalar(kScale);

  const auto dout_out = graph.inner(kF32, sizes.q(), sizes.per_element_strides());
  const auto sum = graph.inner(kF32, sizes.per_token(), sizes.per_token_strides());
  graph.pointwise(CUDNN_POINTWISE_MUL, dout, out, dout_out);
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, dout_out, sum);
  graph.pointwise(CUDNN_POINTWISE_MUL, sum, graph.scalar(kOne), delta);

  const auto raw = score(graph, sizes);
  const auto scaled = score(graph, sizes);
  const auto shifted = score(graph, sizes);
  const auto share = score(graph, sizes);
  const auto share_transposed = graph.inner(kBf16, sizes.scores(), sizes.scores_transposed());
  graph.product(q, k, raw);
  graph.pointwise(CUDNN_POINTWISE_MUL, raw, scale, scaled);
  graph.pointwise(CUDNN_POINTWISE_SUB, scaled, lse, shifted);
  graph.pointwise(CUDNN_POINTWISE_EXP, hide_later(graph, sizes, shifted), nullptr, share);
  graph.reshape(share, share_transposed);
  product_per_group(graph, sizes, share_transposed, dout, dv);

  const auto dshare = score(graph, sizes);
  const auto centred = score(graph, sizes);
  const auto dscaled = score(graph, sizes);
  const auto draw = score(graph, sizes);
  const auto draw_transposed = graph.inner(kBf16, sizes.scores(), sizes.scores_transposed());
  graph.product(dout, v, dshare);
  graph.pointwise(CUDNN_POINTWISE_SUB, dshare, delta, centred);
  graph.pointwise(CUDNN_POINTWISE_MUL, centred, share, dscaled);
  graph.pointwise(CUDNN_POINTWISE_MUL, dscaled, scale, draw);
  graph.reshape(draw, draw_transposed);
  product_per_group(graph, sizes, draw_transposed, q, dk);

  const auto keys = graph.inner(kBf16, sizes.kv(), sizes.packed());
  graph.reshape(k, keys);
  graph.product(draw, keys, dq);
}

}  // namespace

struct CudnnAttention::State {
  State(const CudaAttentionShape& whole, std::size_t scratch)
      : shape(whole), scale(1.0F / std::sqrt(static_cast<float>(whole.head_dim))) {
    shape.rows = attention_rows(whole.rows, whole.heads, whole.context, scratch);
    calls = whole.rows / shape.rows;
    cudnnHandle_t raw = nullptr;
    check_cudnn(cudnnCreate(&raw), "starting");
    handle.reset(raw);
    const Sizes sizes(shape);
    forward.emplace(raw);
    describe_forward(*forward, sizes);
    backward.emplace(raw);
    describe_backward(*backward, sizes);
    if (!forward->build() || !backward->build()) {
      throw Error(ErrorCode::kDevice, "cuDNN has no attention of this shape");
    }
    delta_bytes = (shape.rows * shape.heads * shape.context * sizeof(float) + 255) / 256 * 256;
  }

  // Where the rows of a call begin in a matrix of `width` bf16 elements per token; `before` of them
  // are skipped.
  void* at(const void* matrix, std::size_t call, std::size_t width, std::size_t before = 0) const {
    auto* elements = static_cast<std::uint16_t*>(const_cast<void*>(matrix));
    return elements + call * shape.rows * shape.context * width + before;
  }
  // The queries, keys or values in packed rows, which come after so many heads.
  void* part(const void* qkv, std::size_t call, std::size_t heads_before) const {
    return at(qkv, call, shape.qkv_width(), heads_before * shape.head_dim);
  }
  float* lse_at(const float* lse, std::size_t call) const {
    return const_cast<float*>(lse) + call * shape.rows * shape.heads * shape.context;
  }

  struct Free {
    void operator()(cudnnHandle_t raw) const {
      if (!cuda_given_up()) cudnnDestroy(raw);
    }
  };
  CudaAttentionShape shape;  // of a call
  std::size_t calls = 1;
  float scale;
  float hidden = -std::numeric_limits<float>::infinity();
  float one = 1.0F;
  std::unique_ptr<std::remove_pointer_t<cudnnHandle_t>, Free> handle;
  std::optional<CudnnGraph> forward, backward;
  std::size_t delta_bytes = 0;
};

CudnnAttention::CudnnAttention(const CudaAttentionShape& shape, std::size_t scratch)
    : state_(std::make_unique<State>(shape, scratch)) {}

CudnnAttention::~CudnnAttention() = default;

std::size_t CudnnAttention::workspace_bytes() const {
  const std::int64_t most =
      std::max(state_->forward->workspace_bytes(), state_->backward->workspace_bytes());
  return state_->delta_bytes + static_cast<std::size_t>(most);
}

void CudnnAttention::forward(const void* qkv, void* out, float* lse, void* workspace,
                             cudaStream_t stream) {
  State& own = *state_;
  const std::size_t keys = own.shape.heads;
  const std::size_t values = keys + own.shape.kv_heads;
  check_cudnn(cudnnSetStream(own.handle.get(), stream), "choosing a stream");
  for (std::size_t call = 0; call < own.calls; ++call) {
    own.forward->run(
        {kQ, kK, kV, kOut, kLse, kScale, kHidden},
        {own.part(qkv, call, 0), own.part(qkv, call, keys), own.part(qkv, call, values),
         own.at(out, call, own.shape.hidden()), own.lse_at(lse, call), &own.scale, &own.hidden},
        workspace);
  }
}

void CudnnAttention::backward(const void* qkv, const void* out, const float* lse, const void* dout,
                              void* dqkv, void* workspace, cudaStream_t stream) {
  State& own = *state_;
  const std::size_t keys = own.shape.heads;
  const std::size_t values = keys + own.shape.kv_heads;
  check_cudnn(cudnnSetStream(own.handle.get(), stream), "choosing a stream");
  for (std::size_t call = 0; call < own.calls; ++call) {
    own.backward->run(
        {kQ, kK, kV, kOut, kDout, kLse, kDelta, kDq, kDk, kDv, kScale, kHidden, kOne},
        {own.part(qkv, call, 0), own.part(qkv, call, keys), own.part(qkv, call, values),
         own.at(out, call, own.shape.hidden()), own.at(dout, call, own.shape.hidden()),
         own.lse_at(lse, call), workspace, own.part(dqkv, call, 0), own.part(dqkv, call, keys),
         own.part(dqkv, call, values), &own.scale, &own.hidden, &own.one},
        static_cast<std::byte*>(workspace) + own.delta_bytes);
  }
}

}  // namespace lockstep
