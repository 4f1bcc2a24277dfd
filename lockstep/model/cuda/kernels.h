#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "lockstep/model/cuda/cudnn_attention.h"

namespace lockstep::cuda {

// The kernels of the model, enqueued on a stream. T is what activations are kept in: float or
// __nv_bfloat16; sums are f32 or wider and taken in one order, so that the same operands give the
// same bits every time. Matrices are row-major, one row per token; widths are multiples of 8 and
// pointers aligned to 16 bytes.

template <typename T>
void embed(std::size_t tokens, std::size_t width, const std::int32_t* ids, const T* table, T* x,
           cudaStream_t stream);
// The occurrences of entry v are places[begin[v]] to places[begin[v + 1]], in order. dtable = (or
// +=) the sum of their rows of dx.
template <typename T>
void embed_backward(std::size_t vocab, std::size_t width, const std::uint32_t* begin,
                    const std::uint32_t* places, const T* dx, bool add, float* dtable,
                    cudaStream_t stream);

// out = x / rms(x) * weight; rstd is 1 / rms, one per row.
template <typename T>
void norm_forward(std::size_t rows, std::size_t width, const T* x, const float* weight, float eps,
                  T* out, float* rstd, cudaStream_t stream);
// dx = before + the gradient through the norm; `before` may be null, or dx itself. `scratch` has
// norm_scratch(width) elements.
template <typename T>
struct NormBackward {
  std::size_t rows, width;
  const T* x;
  const float* rstd;
  const float* weight;
  const T* dout;
  const T* before;
  T* dx;
  float* dweight;
  float* scratch;
};
std::size_t norm_scratch(std::size_t width);
template <typename T>
void norm_backward(const NormBackward<T>& call, cudaStream_t stream);

// Rotates the first `heads` heads of every row, which has `stride` elements; backwards with
// `inverse`. cos and sin have a row of head_dim / 2 per position.
struct Rotation {
  std::size_t tokens, context, heads, head_dim, stride;
  const float* cos;
  const float* sin;
  bool inverse;
};
template <typename T>
void rotate(const Rotation& call, T* values, cudaStream_t stream);

// A row of gate_up is `width` gates, then as many ups; act = silu(gate) * up.
template <typename T>
void swiglu_forward(std::size_t rows, std::size_t width, const T* gate_up, T* act,
                    cudaStream_t stream);
// Replaces gate_up by its gradient, and computes `act` once more unless it is null.
template <typename T>
void swiglu_backward(std::size_t rows, std::size_t width, T* gate_up, const T* dact, T* act,
                     cudaStream_t stream);

// Losses of rows of `vocab` logits that are `stride` apart, 0 where the target is negative; correct
// is 1 where no logit is above that of the target, else 0; replaces the logits by their gradients
// when `gradient`.
template <typename T>
void cross_entropy(std::size_t rows, std::size_t vocab, std::size_t stride, T* logits,
                   const std::int32_t* targets, bool gradient, float* losses, std::uint8_t* correct,
                   cudaStream_t stream);

struct LossTotal {
  double loss;
  std::int64_t tokens;  // whose target is not negative
  std::int64_t correct;
};
void sum_losses(std::size_t tokens, const float* losses, const std::uint8_t* correct,
                const std::int32_t* targets, LossTotal* total, cudaStream_t stream);

// What a lane leaves behind. Times are nanoseconds of the GPU's clock.
struct LaneRecord {
  LossTotal total;
  std::uint64_t begun, forward_done, backward_done;
};
// *time = now, when the work before it is done.
void stamp_time(std::uint64_t* time, cudaStream_t stream);
// Completes a lane's record, and counts it among the bad ones when its loss is not finite.
void close_lane(const LossTotal* total, LaneRecord* record, std::uint32_t* bad_losses,
                cudaStream_t stream);

// Causal attention of any shape, simple and slow; lse: rows x heads x context.
template <typename T>
void attention_forward(const CudaAttentionShape& shape, const T* qkv, T* out, float* lse,
                       cudaStream_t stream);
// `delta` is scratch of the size of lse.
template <typename T>
void attention_backward(const CudaAttentionShape& shape, const T* qkv, const T* out,
                        const float* lse, const T* dout, float* delta, T* dqkv,
                        cudaStream_t stream);

// Whether the program has these kernels for the GPU of this thread.
bool has_code_for_gpu();

// into += from.
void add(std::size_t count, float* into, const float* from, cudaStream_t stream);
void round_to(std::size_t count, const float* values, __nv_bfloat16* rounded, cudaStream_t stream);

// Sums of squares of blocks of kNormBlock elements, the last of which may be short.
void block_squares(std::size_t count, const float* values, double* sums, cudaStream_t stream);
// The canonical tree over `count` > 0 numbers, as tree_sum() to the bit; where the result is.
// `scratch` has tree_scratch(count) elements.
std::size_t tree_scratch(std::size_t count);
const double* tree_sum(std::size_t count, const double* values, double* scratch,
                       cudaStream_t stream);

// What an update is made with. The host fills in the first part, decide_update() the rest.
struct UpdateState {
  double tokens, clip;
  double norm;  // ignored where there is a sum of squares
  float rate, root_scale, keep;
  float factor;
  std::uint32_t apply;  // whether AdamW is to do anything
};
// `squares` is the square of the norm, or null: the norm is given. The factor is as
// gradient_factor() to the bit.
void decide_update(const double* squares, const std::uint32_t* bad_losses, UpdateState* state,
                   cudaStream_t stream);

// Elements that weight decay treats alike.
struct Piece {
  std::uint64_t begin;
  std::uint32_t count;
  std::uint32_t decay;
};
struct AdamWStep {
  const UpdateState* state;
  float beta1, rest1, beta2, rest2, eps;
  std::uint64_t first_element;  // the moments begin there
  const float* sum;
  float* parameters;
  float* first;
  float* second;
  __nv_bfloat16* rounded;  // a copy of the parameters, or null
};
// As AdamW (lockstep/model/cpu/adamw.h), to the bit; nothing unless the state says so.
void adamw(const AdamWStep& step, std::size_t pieces, const Piece* list, cudaStream_t stream);

}  // namespace lockstep::cuda
