// attention_impl.h with bf16 products: the same blocks, in units that suit a matrix unit.
#include "lockstep/model/cpu/bf16_product.h"

namespace lockstep {
namespace {

constexpr std::size_t unit_floor(std::size_t size) { return size / kUnit * kUnit; }

// Scratch, handed out from the front.
struct Taker {
  float* next;
  float* take(std::size_t count) {
    float* taken = next;
    next += count;
    return taken;
  }
};

// Scores a·b of `rows` queries, the first at position `first`, with the keys from `key` to
// `key_end`: blocks that reach the diagonal or lie below it.
template <typename Products>
void score_blocks(const Word* a, std::size_t width, std::size_t rows, std::size_t first,
                  const Word* panels, std::size_t key, std::size_t key_end, float* scores,
                  std::size_t stride) {
  for (std::size_t k = key; k < key_end; k += kUnit) {
    const std::size_t above = k > first ? unit_floor(k - first) : 0;
    Products::multiply({.rows = rows - above,
                        .cols = kUnit,
                        .depth = width,
                        .a = a + above * width / 2,
                        .a_stride = width / 2,
                        .b = panels + k * width / 2,
                        .b_panel = kPanelWords * width / 2,
                        .c = scores + above * stride + (k - key),
                        .c_stride = stride,
                        .add = false});
  }
}

template <typename Products>
void forward(const AttentionForward& call) {
  const AttentionShape& shape = call.shape;
  const std::size_t keys = shape.first + shape.queries;
  const std::size_t width = round_up(shape.head_dim, kUnit);
  const std::size_t padded = round_up(keys, kUnit);
  Taker scratch = {call.scratch};
  Word* key_panels = scratch.take(padded * width / 2);
  Word* value_panels = scratch.take(padded * width / 2);
  float* staging = scratch.take(kQueryBlock * width);
  Word* queries = scratch.take(kQueryBlock * width / 2);
  float* sums = scratch.take(kQueryBlock * width);
  float* scores = scratch.take(kQueryBlock * padded);
  Word* probabilities = scratch.take(kQueryBlock * padded / 2);
  Products::begin();

  for (std::size_t k = 0; k < padded; k += 16) {
    for (std::size_t i = 0; i < 16; ++i) {
      if (k + i < keys) {
        fetch_ahead(call.k, shape.kv_stride, k + i, keys, shape.head_dim);
        copy_rotated(shape, k + i, call.k + (k + i) * shape.kv_stride, 1.0f, width,
                     staging + i * width);
      } else {
        zero(staging + i * width, width);
      }
      to_words(staging + i * width, width, queries + i * width / 2);
    }
    rows_to_panel(queries, width / 2, key_panels + k * width / 2);
  }
  for (std::size_t k = 0; k < padded; ++k) {
    float* row = staging + k % 2 * width;
    if (k < keys) {
      fetch_ahead(call.v, shape.kv_stride, k, keys, shape.head_dim);
      copy_row(call.v + k * shape.kv_stride, shape.head_dim, width, row);
    } else {
      zero(row, width);
    }
    if (k % 2 == 1) pair_to_panels(staging, row, width, padded, k / 2, value_panels);
  }

  for (std::size_t head = 0; head < shape.group; ++head) {
    const float* q = call.q + head * shape.head_dim;
    float* out = call.out + head * shape.head_dim;
    float* lse = call.lse + head * shape.queries;
    for (std::size_t begin = 0; begin < shape.queries; begin += kQueryBlock) {
      const std::size_t rows = least(kQueryBlock, shape.queries - begin);
      const std::size_t tiled = round_up(rows, kUnit);
      const std::size_t first = shape.first + begin;
      const std::size_t end = first + rows;  // of the keys that any of the rows sees
      for (std::size_t r = 0; r < tiled; ++r) {
        if (r < rows) {
          fetch_ahead(q, shape.q_stride, begin + r, shape.queries, shape.head_dim);
          copy_rotated(shape, first + r, q + (begin + r) * shape.q_stride,
                       score_scale(shape.head_dim), width, staging);
        } else {
          zero(staging, width);
        }
        to_words(staging, width, queries + r * width / 2);
      }
      score_blocks<Products>(queries, width, tiled, first, key_panels, 0, end, scores, padded);
      float inverse[kQueryBlock];
      for (std::size_t r = 0; r < rows; ++r) {
        float* row = scores + r * padded;
        const std::size_t count = first + r + 1;
        inverse[r] = softmax(row, count, count, lse[begin + r]);
        const std::size_t vectors = round_up(count, kWidth);
        zero(row + vectors, round_up(end, kUnit) - vectors);
      }
      for (std::size_t r = rows; r < tiled; ++r) zero(scores + r * padded, round_up(end, kUnit));
      for (std::size_t r = 0; r < tiled; ++r) {
        to_words(scores + r * padded, round_up(end, kUnit), probabilities + r * padded / 2);
      }
      for (std::size_t r = 0; r < tiled; r += kUnit) {
        Products::multiply({.rows = kUnit,
                            .cols = width,
                            .depth = round_up(least(end, first + r + kUnit), kUnit),
                            .a = probabilities + r * padded / 2,
                            .a_stride = padded / 2,
                            .b = value_panels,
                            .b_panel = kPanelWords * padded / 2,
                            .c = sums + r * width,
                            .c_stride = width,
                            .add = false});
      }
      write_scaled(sums, width, shape.head_dim, inverse, rows, out + begin * shape.out_stride,
                   shape.out_stride);
    }
  }
}

struct BackwardScratch {
  BackwardScratch(float* scratch, const AttentionShape& shape)
      : width(round_up(shape.head_dim, kUnit)), padded(round_up(shape.queries, kUnit)) {
    Taker taker = {scratch};
    const std::size_t words = padded * width / 2;
    key_panels = taker.take(words);
    value_panels = taker.take(words);
    key_rows = taker.take(words);
    queries = taker.take(words);
    query_rows = taker.take(words);
    dout = taker.take(words);
    dout_rows = taker.take(words);
    dq = taker.take(padded * width);
    dk = taker.take(padded * width);
    dv = taker.take(padded * width);
    staging = taker.take(4 * width + 16 * width);
    scores = taker.take(kQueryBlock * kKeyChunk);
    dscores = taker.take(kQueryBlock * kKeyChunk);
    dscore_words = taker.take(kQueryBlock * kKeyChunk / 2);
    scores_transposed = taker.take(kQueryBlock * kKeyChunk / 2);
    dscores_transposed = taker.take(kQueryBlock * kKeyChunk / 2);
    delta = taker.take(padded);
  }

  std::size_t width, padded;
  Word *key_panels, *value_panels;          // columns are keys, depth is the head
  Word *key_rows, *query_rows, *dout_rows;  // columns are the head, depth is keys or queries
  Word *queries, *dout;                     // left-hand
  float *dq, *dk, *dv;
  float* staging;
  float *scores, *dscores;  // kQueryBlock x kKeyChunk
  Word* dscore_words;
  Word *scores_transposed, *dscores_transposed;  // kKeyChunk x kQueryBlock
  float* delta;
};

inline void pack_keys(const AttentionBackward& call, const BackwardScratch& s) {
  const AttentionShape& shape = call.shape;
  Word* key_words = s.staging + 4 * s.width;  // 16 rows of each
  Word* value_words = key_words + 8 * s.width;
  for (std::size_t k = 0; k < s.padded; ++k) {
    float* key = s.staging + k % 2 * s.width;
    float* value = s.staging + 2 * s.width;
    if (k < shape.queries) {
      fetch_ahead(call.k, shape.kv_stride, k, shape.queries, shape.head_dim);
      fetch_ahead(call.v, shape.kv_stride, k, shape.queries, shape.head_dim);
      copy_rotated(shape, k, call.k + k * shape.kv_stride, 1.0f, s.width, key);
      copy_row(call.v + k * shape.kv_stride, shape.head_dim, s.width, value);
    } else {
      zero(key, s.width);
      zero(value, s.width);
    }
    to_words(key, s.width, key_words + k % 16 * s.width / 2);
    to_words(value, s.width, value_words + k % 16 * s.width / 2);
    if (k % 2 == 1) pair_to_panels(s.staging, key, s.width, s.padded, k / 2, s.key_rows);
    if (k % 16 == 15) {
      rows_to_panel(key_words, s.width / 2, s.key_panels + (k - 15) * s.width / 2);
      rows_to_panel(value_words, s.width / 2, s.value_panels + (k - 15) * s.width / 2);
    }
  }
  zero(s.dk, s.padded * s.width);
  zero(s.dv, s.padded * s.width);
}

inline void pack_queries(const AttentionBackward& call, std::size_t head,
                         const BackwardScratch& s) {
  const AttentionShape& shape = call.shape;
  const float* q = call.q + head * shape.head_dim;
  const float* out = call.out + head * shape.head_dim;
  const float* dout = call.dout + head * shape.head_dim;
  for (std::size_t r = 0; r < s.padded; ++r) {
    float* query = s.staging + r % 2 * s.width;
    float* gradient = s.staging + (2 + r % 2) * s.width;
    if (r < shape.queries) {
      fetch_ahead(q, shape.q_stride, r, shape.queries, shape.head_dim);
      fetch_ahead(out, shape.out_stride, r, shape.queries, shape.head_dim);
      fetch_ahead(dout, shape.out_stride, r, shape.queries, shape.head_dim);
      copy_rotated(shape, r, q + r * shape.q_stride, score_scale(shape.head_dim), s.width, query);
      copy_row(dout + r * shape.out_stride, shape.head_dim, s.width, gradient);
      s.delta[r] = dot(out + r * shape.out_stride, gradient, shape.head_dim);
    } else {
      zero(query, s.width);
      zero(gradient, s.width);
    }
    to_words(query, s.width, s.queries + r * s.width / 2);
    to_words(gradient, s.width, s.dout + r * s.width / 2);
    if (r % 2 == 1) {
      pair_to_panels(s.staging, query, s.width, s.padded, r / 2, s.query_rows);
      pair_to_panels(s.staging + 2 * s.width, gradient, s.width, s.padded, r / 2, s.dout_rows);
    }
  }
  zero(s.dq, s.padded * s.width);
}

template <typename Products>
void backward_block(const AttentionShape& shape, const BackwardScratch& s, std::size_t query,
                    std::size_t key, const float* lse) {
  const std::size_t rows = least(kQueryBlock, shape.queries - query);
  const std::size_t tiled = round_up(rows, kUnit);
  const std::size_t key_end = round_up(least(key + kKeyChunk, query + rows), kUnit);
  const std::size_t keys = key_end - key;
  const std::size_t width = s.width;
  constexpr std::size_t kWords = kQueryBlock / 2;  // a row of the transposed scores

  score_blocks<Products>(s.queries + query * width / 2, width, tiled, query, s.key_panels, key,
                         key_end, s.scores, kKeyChunk);
  score_blocks<Products>(s.dout + query * width / 2, width, tiled, query, s.value_panels, key,
                         key_end, s.dscores, kKeyChunk);
  for (std::size_t r = 0; r < tiled; ++r) {
    float* p = s.scores + r * kKeyChunk;
    float* ds = s.dscores + r * kKeyChunk;
    std::size_t done = 0;
    if (r < rows) {
      const std::size_t count = least(keys, query + r + 1 - key);
      softmax_backward(p, ds, count, lse[query + r], s.delta[query + r]);
      done = round_up(count, kWidth);
    }
    zero(p + done, keys - done);
    zero(ds + done, keys - done);
    to_words(ds, keys, s.dscore_words + r * kKeyChunk / 2);
  }
  transposed_words(s.scores, kKeyChunk, tiled, keys, s.scores_transposed, kWords);
  transposed_words(s.dscores, kKeyChunk, tiled, keys, s.dscores_transposed, kWords);

  const auto add = [&](std::size_t depth, const Word* a, std::size_t a_stride, const Word* b,
                       std::size_t from, float* c) {
    Products::multiply({.rows = kUnit,
                        .cols = width,
                        .depth = depth,
                        .a = a,
                        .a_stride = a_stride,
                        .b = b + from * kPanelWords / 2,
                        .b_panel = kPanelWords * s.padded / 2,
                        .c = c,
                        .c_stride = width,
                        .add = true});
  };
  for (std::size_t r = 0; r < tiled; r += kUnit) {
    add(least(keys, query + r + kUnit - key), s.dscore_words + r * kKeyChunk / 2, kKeyChunk / 2,
        s.key_rows, key, s.dq + (query + r) * width);
  }
  for (std::size_t k = 0; k < keys; k += kUnit) {
    const std::size_t above = key + k > query ? key + k - query : 0;
    const std::size_t place = k * kWords + above / 2;
    add(tiled - above, s.scores_transposed + place, kWords, s.dout_rows, query + above,
        s.dv + (key + k) * width);
    add(tiled - above, s.dscores_transposed + place, kWords, s.query_rows, query + above,
        s.dk + (key + k) * width);
  }
}

template <typename Products>
void backward(const AttentionBackward& call) {
  const AttentionShape& shape = call.shape;
  const BackwardScratch s(call.scratch, shape);
  Products::begin();
  pack_keys(call, s);
  for (std::size_t head = 0; head < shape.group; ++head) {
    pack_queries(call, head, s);
    for (std::size_t key = 0; key < shape.queries; key += kKeyChunk) {
      for (std::size_t query = key; query < shape.queries; query += kQueryBlock) {
        backward_block<Products>(shape, s, query, key, call.lse + head * shape.queries);
      }
    }
    write_dq(call, head, s.dq, s.width);
  }
  write_dk_dv(call, s.dk, s.dv, s.width);
}

}  // namespace

const Bf16Attention kBf16AttentionAmx = {forward<AmxProducts>, backward<AmxProducts>};
const Bf16Attention kBf16AttentionEmulated = {forward<EmulatedProducts>,
                                              backward<EmulatedProducts>};

}  // namespace lockstep
