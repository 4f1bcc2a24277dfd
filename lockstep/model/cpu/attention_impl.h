// Causal attention in small matrix products, for kernels_impl.h. A *panel* is kPanel columns of a
// right-hand matrix, a *tile* is kTileRows rows times a panel of the result, whose sums stay in
// registers. Everything is copied into scratch that is padded to whole tiles, so there are no
// tails; tiles above the diagonal are left out.
#pragma once

#include "lockstep/model/cpu/attention_parts.h"

namespace lockstep {
namespace {

constexpr std::size_t kPanel = 2 * kWidth;
constexpr std::size_t kTileRows = kWidth == 16 ? 8 : 4;
static_assert(kAttentionPad % kPanel == 0 && kQueryBlock % kPanel == 0 &&
              kKeyChunk % kQueryBlock == 0 && kWidth % kTileRows == 0);

// A left-hand matrix: element (row, k) is data[row * stride + k], or data[k * stride + row].
struct Left {
  const float* data;
  std::size_t stride;
};

// A right-hand matrix of one panel: row k begins at data[k * stride].
struct Right {
  const float* data;
  std::size_t stride;
};

enum class Sum { kStart, kContinue };

// One tile: c = a·b, or c += a·b.
template <bool kTransposed, Sum kSum>
inline void tile(std::size_t depth, Left a, Right b, float* c, std::size_t c_stride) {
  Vec sums[kTileRows][2];
#pragma GCC unroll 8
  for (std::size_t r = 0; r < kTileRows; ++r) {
    sums[r][0] = kSum == Sum::kStart ? set1(0.0f) : load(c + r * c_stride);
    sums[r][1] = kSum == Sum::kStart ? set1(0.0f) : load(c + r * c_stride + kWidth);
  }
  const float* left = a.data;
  const float* right = b.data;
  for (std::size_t k = 0; k < depth; ++k) {
    const Vec low = load(right);
    const Vec high = load(right + kWidth);
#pragma GCC unroll 8
    for (std::size_t r = 0; r < kTileRows; ++r) {
      const Vec factor = set1(kTransposed ? left[r] : left[r * a.stride]);
      sums[r][0] = fma(factor, low, sums[r][0]);
      sums[r][1] = fma(factor, high, sums[r][1]);
    }
    left += kTransposed ? a.stride : 1;
    right += b.stride;
  }
#pragma GCC unroll 8
  for (std::size_t r = 0; r < kTileRows; ++r) {
    store(c + r * c_stride, sums[r][0]);
    store(c + r * c_stride + kWidth, sums[r][1]);
  }
}

// out (cols x kPanel) = the transpose of kPanel rows. `cols` is a multiple of kPanel.
inline void transpose(const float* rows, std::size_t cols, float* out) {
#ifdef __AVX512F__
  for (std::size_t half = 0; half < kPanel; half += kWidth) {
    for (std::size_t col = 0; col < cols; col += kWidth) {
      transpose16(rows + half * cols + col, cols, out + col * kPanel + half, kPanel);
    }
  }
#else
  for (std::size_t col = 0; col < cols; ++col) {
    for (std::size_t row = 0; row < kPanel; ++row) out[col * kPanel + row] = rows[row * cols + col];
  }
#endif
}

// The tiles of scores a·b that reach the diagonal or lie below it: a has `rows` rows, the first at
// position `first`; b is panels from key `key` to `key_end`, which go to column 0 and on.
inline void score_tiles(const float* a, std::size_t width, std::size_t depth, std::size_t rows,
                        std::size_t first, const float* panels, std::size_t key,
                        std::size_t key_end, float* scores, std::size_t stride) {
  for (std::size_t k = key; k < key_end; k += kPanel) {
    const std::size_t above = k > first ? (k - first) / kTileRows * kTileRows : 0;
    for (std::size_t r = above; r < rows; r += kTileRows) {
      tile<false, Sum::kStart>(depth, {a + r * width, width}, {panels + k * width, kPanel},
                               scores + r * stride + (k - key), stride);
    }
  }
}

void attention_forward(const AttentionForward& call) {
  const AttentionShape& shape = call.shape;
  const std::size_t keys = shape.first + shape.queries;
  const std::size_t width = round_up(shape.head_dim, kPanel);
  const std::size_t stride = round_up(keys, kPanel);  // of scores
  float* key_panels = call.scratch;
  float* values = key_panels + stride * width;
  float* queries = values + stride * width;
  float* sums = queries + kQueryBlock * width;
  float* scores = sums + kQueryBlock * width;

  for (std::size_t k = 0; k < stride; k += kPanel) {
    // The queries are not needed yet: their memory holds the rows to be transposed.
    for (std::size_t i = 0; i < kPanel; ++i) {
      if (k + i < keys) {
        fetch_ahead(call.k, shape.kv_stride, k + i, keys, shape.head_dim);
        copy_rotated(shape, k + i, call.k + (k + i) * shape.kv_stride, 1.0f, width,
                     queries + i * width);
      } else {
        zero(queries + i * width, width);
      }
    }
    transpose(queries, width, key_panels + k * width);
  }
  for (std::size_t k = 0; k < keys; ++k) {
    fetch_ahead(call.v, shape.kv_stride, k, keys, shape.head_dim);
    copy_row(call.v + k * shape.kv_stride, shape.head_dim, width, values + k * width);
  }

  for (std::size_t head = 0; head < shape.group; ++head) {
    const float* q = call.q + head * shape.head_dim;
    float* out = call.out + head * shape.head_dim;
    float* lse = call.lse + head * shape.queries;
    for (std::size_t begin = 0; begin < shape.queries; begin += kQueryBlock) {
      const std::size_t rows = least(kQueryBlock, shape.queries - begin);
      const std::size_t tiled = round_up(rows, kTileRows);
      const std::size_t first = shape.first + begin;
      const std::size_t end = first + rows;  // of the keys that any of the rows sees
      for (std::size_t r = 0; r < rows; ++r) {
        fetch_ahead(q, shape.q_stride, begin + r, shape.queries, shape.head_dim);
        copy_rotated(shape, first + r, q + (begin + r) * shape.q_stride,
                     score_scale(shape.head_dim), width, queries + r * width);
      }
      zero(queries + rows * width, (tiled - rows) * width);
      score_tiles(queries, width, shape.head_dim, tiled, first, key_panels, 0, end, scores, stride);
      float inverse[kQueryBlock];
      for (std::size_t r = 0; r < rows; ++r) {
        inverse[r] = softmax(scores + r * stride, first + r + 1, end, lse[begin + r]);
      }
      for (std::size_t r = 0; r < tiled; r += kTileRows) {
        const std::size_t depth = least(end, first + r + kTileRows);
        for (std::size_t col = 0; col < width; col += kPanel) {
          tile<false, Sum::kStart>(depth, {scores + r * stride, stride}, {values + col, width},
                                   sums + r * width + col, width);
        }
      }
      write_scaled(sums, width, shape.head_dim, inverse, rows, out + begin * shape.out_stride,
                   shape.out_stride);
    }
  }
}

}  // namespace
}  // namespace lockstep

#include "lockstep/model/cpu/attention_backward_impl.h"
