// What every kind of attention does row by row, for the *_impl.h and bf16 files of this folder.
#pragma once

#include "lockstep/model/cpu/kernels.h"
#include "lockstep/model/cpu/vec.h"

#ifdef __AVX512F__
#include "lockstep/model/cpu/avx512.h"
#endif

namespace lockstep {
namespace {

constexpr std::size_t round_up(std::size_t size, std::size_t unit) {
  return (size + unit - 1) / unit * unit;
}
constexpr std::size_t least(std::size_t a, std::size_t b) { return a < b ? a : b; }

#ifdef __AVX512F__
// out = the transpose of 16 x 16 words of 32 bits, whatever they mean.
inline void transpose16(const float* in, std::size_t in_stride, float* out,
                        std::size_t out_stride) {
  __m512 r[16];
#pragma GCC unroll 16
  for (std::size_t i = 0; i < 16; ++i) r[i] = load(in + i * in_stride);
  transpose16(r);
#pragma GCC unroll 16
  for (std::size_t i = 0; i < 16; ++i) store(out + i * out_stride, r[i]);
}
#endif

inline void zero(float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = 0.0f;
}

// The rows of a head lie far apart in memory; the one that comes `kAhead` rows later is asked for.
template <bool kWrite = false>
inline void fetch_ahead(const float* rows, std::size_t stride, std::size_t row, std::size_t count,
                        std::size_t width) {
  constexpr std::size_t kAhead = 8;
  if (row + kAhead >= count) return;
  const float* line = rows + (row + kAhead) * stride;
  for (std::size_t i = 0; i < width; i += 16) __builtin_prefetch(line + i, kWrite ? 1 : 0);
}

// The rotary embedding of one head at one position, scaled: pairs (i, i + head_dim / 2) are turned.
inline void rotate(const AttentionShape& shape, std::size_t position, const float* x, float scale,
                   float* out) {
  const std::size_t half = shape.head_dim / 2;
  const float* cos = shape.cos + position * half;
  const float* sin = shape.sin + position * half;
  Row{half}.each([&](auto get, auto put) {
    const Vec a = get(x) * set1(scale);
    const Vec b = get(x + half) * set1(scale);
    put(out, fnma(b, get(sin), a * get(cos)));
    put(out + half, fma(a, get(sin), b * get(cos)));
  });
}

// The way back, for gradients.
inline void rotate_back(const AttentionShape& shape, std::size_t position, const float* x,
                        float scale, float* out) {
  const std::size_t half = shape.head_dim / 2;
  const float* cos = shape.cos + position * half;
  const float* sin = shape.sin + position * half;
  Row{half}.each([&](auto get, auto put) {
    const Vec a = get(x) * set1(scale);
    const Vec b = get(x + half) * set1(scale);
    put(out, fma(b, get(sin), a * get(cos)));
    put(out + half, fnma(a, get(sin), b * get(cos)));
  });
}

inline void copy_row(const float* x, std::size_t count, std::size_t width, float* out) {
  Row{count}.each([&](auto get, auto put) { put(out, get(x)); });
  zero(out + count, width - count);
}

inline void copy_rotated(const AttentionShape& shape, std::size_t position, const float* x,
                         float scale, std::size_t width, float* out) {
  rotate(shape, position, x, scale, out);
  zero(out + shape.head_dim, width - shape.head_dim);
}

inline float score_scale(std::size_t head_dim) {
  return 1.0f / __builtin_sqrtf(static_cast<float>(head_dim));
}

// Replaces `count` scores by exp(score - most), and what follows them, up to `end`, by 0 as far as
// tiles reach. Returns the sum.
inline float exponentials(float* scores, std::size_t count, std::size_t end, float most) {
  const Vec lowest = set1(-__builtin_inff());
  Vec total = set1(0.0f);
  std::size_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Vec e = exp(load(scores + i) - set1(most));
    store(scores + i, e);
    total = total + e;
  }
  if (i < count) {
    const Vec e = exp(load_part(scores + i, count - i, lowest) - set1(most));
    store(scores + i, e);
    total = total + e;
    i += kWidth;
  }
  if (i < end) store(scores + i, set1(0.0f));
  return sum_of(total);
}

inline float greatest(const float* scores, std::size_t count) {
  const Vec lowest = set1(-__builtin_inff());
  Vec most = lowest;
  for_vectors(
      count, [&](std::size_t i) { most = max(load(scores + i), most); },
      [&](std::size_t i, std::size_t n) { most = max(load_part(scores + i, n, lowest), most); });
  return max_of(most);
}

// exponentials() of a row of scores. Returns what makes them probabilities, and the logarithm of
// their sum in `lse`.
inline float softmax(float* scores, std::size_t count, std::size_t end, float& lse) {
  const float most = greatest(scores, count);
  const float sum = exponentials(scores, count, end, most);
  lse = static_cast<float>(static_cast<double>(most) + __builtin_log(static_cast<double>(sum)));
  return 1.0f / sum;
}

// Rows of `count` numbers, each times its scale, to where they lie further apart.
inline void write_scaled(const float* from, std::size_t width, std::size_t count,
                         const float* scales, std::size_t rows, float* to, std::size_t stride) {
  for (std::size_t r = 0; r < rows; ++r) {
    const float* row = from + r * width;
    float* out = to + r * stride;
    Row{count}.each([&](auto get, auto put) { put(out, get(row) * set1(scales[r])); });
  }
}

// Replaces `count` scores by probabilities and `dscores` by the gradient of the scores; zeroes what
// follows them in the last vector.
inline void softmax_backward(float* scores, float* dscores, std::size_t count, float lse,
                             float delta) {
  const Vec lowest = set1(-__builtin_inff());
  for_vectors(
      count,
      [&](std::size_t i) {
        const Vec p = exp(load(scores + i) - set1(lse));
        store(scores + i, p);
        store(dscores + i, p * (load(dscores + i) - set1(delta)));
      },
      [&](std::size_t i, std::size_t n) {
        const Vec p = exp(load_part(scores + i, n, lowest) - set1(lse));
        store(scores + i, p);
        store(dscores + i, p * (load_part(dscores + i, n, set1(0.0f)) - set1(delta)));
      });
}

// The gradients of a head's queries, which lie in rows of `width`, to where they belong.
inline void write_dq(const AttentionBackward& call, std::size_t head, const float* dq,
                     std::size_t width) {
  const AttentionShape& shape = call.shape;
  float* to = call.dq + head * shape.head_dim;
  for (std::size_t r = 0; r < shape.queries; ++r) {
    fetch_ahead<true>(to, shape.q_stride, r, shape.queries, shape.head_dim);
    rotate_back(shape, r, dq + r * width, score_scale(shape.head_dim), to + r * shape.q_stride);
  }
}

// The same of keys and values.
inline void write_dk_dv(const AttentionBackward& call, const float* dk, const float* dv,
                        std::size_t width) {
  const AttentionShape& shape = call.shape;
  for (std::size_t k = 0; k < shape.queries; ++k) {
    fetch_ahead<true>(call.dk, shape.kv_stride, k, shape.queries, shape.head_dim);
    fetch_ahead<true>(call.dv, shape.kv_stride, k, shape.queries, shape.head_dim);
    rotate_back(shape, k, dk + k * width, 1.0f, call.dk + k * shape.kv_stride);
    const float* row = dv + k * width;
    float* to = call.dv + k * shape.kv_stride;
    Row{shape.head_dim}.each([&](auto get, auto put) { put(to, get(row)); });
  }
}

inline float dot(const float* a, const float* b, std::size_t count) {
  Vec sum = set1(0.0f);
  Row{count}.each([&](auto get, auto) { sum = fma(get(a), get(b), sum); });
  return sum_of(sum);
}

}  // namespace
}  // namespace lockstep
