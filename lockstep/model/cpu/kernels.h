#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

// The loops of the model, compiled once per instruction set; each works on a few rows, and callers
// hand out the rows. A row's result depends on that row alone.

struct AdamWScalars {
  float factor, beta1, rest1, beta2, rest2, rate, root_scale, eps, keep;
};

// sum = x + y (when there is a y), out = sum / rms(sum) * weight; `rstd` is 1 / rms, one per row.
struct NormForward {
  std::size_t rows, width;
  const float* x;
  const float* y;  // may be null; then `sum` is not written
  const float* weight;
  float eps;
  float* sum;
  float* out;
  float* rstd;
};

// dx += the gradient through the norm, dweight += that of the weight.
struct NormBackward {
  std::size_t rows, width;
  const float* x;
  const float* rstd;
  const float* weight;
  const float* dout;
  float* dx;
  float* dweight;
};

// A row of gate_up is `width` gates, then as many ups; act = silu(gate) * up.
struct SwigluForward {
  std::size_t rows, width;
  const float* gate_up;
  float* act;
};

// Replaces gate_up by its gradient, and computes `act` once more.
struct SwigluBackward {
  std::size_t rows, width;
  float* gate_up;
  const float* dact;
  float* act;
};

// loss = -log softmax(logits)[target], 0 for a negative target; correct: no logit is above that of
// the target; replaces logits by their gradient, when that is wanted.
struct CrossEntropy {
  std::size_t rows, width;
  float* logits;
  const std::int32_t* targets;
  bool gradient;
  double* loss;           // one per row, as is
  std::uint8_t* correct;  // 0 or 1
};

// Causal attention of one sequence for the `group` query heads that share one head of keys and
// values. Query row i stands at position first + i and sees keys 0 to first + i; q and k are
// rotated here. Pointers are to row 0 of the (first) head; heads follow each other in a row.
struct AttentionShape {
  std::size_t first, queries, group, head_dim;
  std::size_t q_stride, kv_stride, out_stride;
  const float* cos;  // a row per position, head_dim / 2 wide
  const float* sin;
};

struct AttentionForward {
  AttentionShape shape;
  const float* q;
  const float* k;
  const float* v;
  float* out;
  float* lse;  // log of the sum of exponentials: `queries` per head
  float* scratch;
};

// All queries of a sequence (`first` is 0). Strides as in the forward pass.
struct AttentionBackward {
  AttentionShape shape;
  const float* q;
  const float* k;
  const float* v;
  const float* out;
  const float* lse;
  const float* dout;
  float* dq;
  float* dk;
  float* dv;
  float* scratch;
};

struct ModelKernels {
  const char* name;
  double (*squares)(const float* values, std::size_t count);
  void (*adamw)(const AdamWScalars& scalars, std::size_t count, const float* sum, float* parameters,
                float* first, float* second);
  void (*norm_forward)(const NormForward& call);
  void (*norm_backward)(const NormBackward& call);
  void (*swiglu_forward)(const SwigluForward& call);
  void (*swiglu_backward)(const SwigluBackward& call);
  void (*cross_entropy)(const CrossEntropy& call);
  // out += each row in turn.
  void (*add_rows)(std::size_t rows, std::size_t width, const float* values, std::size_t stride,
                   float* out);
  void (*attention_forward)(const AttentionForward& call);
  void (*attention_backward)(const AttentionBackward& call);
};

// What attention needs as scratch, in floats, for sequences of up to `context` positions.
std::size_t attention_scratch(std::size_t context, std::size_t head_dim);

// What this processor can run, the fastest first.
std::vector<const ModelKernels*> supported_model_kernels();
const ModelKernels& best_model_kernels();

// Attention whose products take bf16 and add in f32, on a matrix unit. Everything else (rotations,
// softmax, sums) is f32. The calls are those of ModelKernels.
struct Bf16Attention {
  void (*forward)(const AttentionForward& call);
  void (*backward)(const AttentionBackward& call);
};

// Null where the processor has no matrix unit for bf16.
const Bf16Attention* bf16_attention();
// The same without a matrix unit, slowly, for tests; null where there is not even AVX-512.
const Bf16Attention* emulated_bf16_attention();

// What both need as scratch, in floats.
std::size_t bf16_attention_scratch(std::size_t context, std::size_t head_dim);

// What follows is for kernels*.cc and bf16_attention_v4.cc only.

extern const ModelKernels kModelKernelsGeneric;
extern const ModelKernels kModelKernelsV3;  // defined for x86-64 only, as is the next
extern const ModelKernels kModelKernelsV4;

extern const Bf16Attention kBf16AttentionAmx;  // defined for x86-64 only, as is the next
extern const Bf16Attention kBf16AttentionEmulated;

constexpr std::size_t kAttentionPad = 64;  // rows and columns of attention's scratch: a multiple
constexpr std::size_t kQueryBlock = 64;
constexpr std::size_t kKeyChunk = 256;

}  // namespace lockstep
