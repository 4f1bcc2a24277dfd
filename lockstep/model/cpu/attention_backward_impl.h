// The backward pass of attention_impl.h. Keys are taken in chunks, for each of which all later
// queries pass by, so that what is summed up for the keys stays in the cache.
#pragma once

namespace lockstep {
namespace {

// Scratch of one call, in rows of `width`.
struct BackwardScratch {
  std::size_t width;
  float *key_panels, *value_panels, *keys, *queries, *dout, *dq, *dk, *dv;
  float *scores, *dscores;  // kQueryBlock x kKeyChunk
  float* delta;             // one per query
};

inline BackwardScratch split_scratch(float* scratch, std::size_t queries, std::size_t head_dim) {
  const std::size_t width = round_up(head_dim, kPanel);
  const std::size_t each = round_up(queries, kPanel) * width;
  float* scores = scratch + 8 * each;
  return {.width = width,
          .key_panels = scratch,
          .value_panels = scratch + each,
          .keys = scratch + 2 * each,
          .queries = scratch + 3 * each,
          .dout = scratch + 4 * each,
          .dq = scratch + 5 * each,
          .dk = scratch + 6 * each,
          .dv = scratch + 7 * each,
          .scores = scores,
          .dscores = scores + kQueryBlock * kKeyChunk,
          .delta = scores + 2 * kQueryBlock * kKeyChunk};
}

// Keys as rows and as panels, values as panels; zeroes what is summed up for them.
inline void pack_keys(const AttentionBackward& call, const BackwardScratch& s) {
  const AttentionShape& shape = call.shape;
  const std::size_t padded = round_up(shape.queries, kPanel);
  for (std::size_t k = 0; k < padded; ++k) {
    if (k < shape.queries) {
      fetch_ahead(call.k, shape.kv_stride, k, shape.queries, shape.head_dim);
      fetch_ahead(call.v, shape.kv_stride, k, shape.queries, shape.head_dim);
      copy_rotated(shape, k, call.k + k * shape.kv_stride, 1.0f, s.width, s.keys + k * s.width);
      copy_row(call.v + k * shape.kv_stride, shape.head_dim, s.width, s.dv + k * s.width);
    } else {
      zero(s.keys + k * s.width, s.width);
      zero(s.dv + k * s.width, s.width);
    }
  }
  for (std::size_t k = 0; k < padded; k += kPanel) {
    transpose(s.keys + k * s.width, s.width, s.key_panels + k * s.width);
    transpose(s.dv + k * s.width, s.width, s.value_panels + k * s.width);
  }
  zero(s.dk, padded * s.width);
  zero(s.dv, padded * s.width);
}

// Also delta: what the probabilities of a row share, as their sum is 1.
inline void pack_queries(const AttentionBackward& call, std::size_t head,
                         const BackwardScratch& s) {
  const AttentionShape& shape = call.shape;
  const std::size_t padded = round_up(shape.queries, kPanel);
  const float* q = call.q + head * shape.head_dim;
  const float* out = call.out + head * shape.head_dim;
  const float* dout = call.dout + head * shape.head_dim;
  for (std::size_t r = 0; r < shape.queries; ++r) {
    fetch_ahead(q, shape.q_stride, r, shape.queries, shape.head_dim);
    fetch_ahead(out, shape.out_stride, r, shape.queries, shape.head_dim);
    fetch_ahead(dout, shape.out_stride, r, shape.queries, shape.head_dim);
    copy_rotated(shape, r, q + r * shape.q_stride, score_scale(shape.head_dim), s.width,
                 s.queries + r * s.width);
    const float* row = dout + r * shape.out_stride;
    copy_row(row, shape.head_dim, s.width, s.dout + r * s.width);
    s.delta[r] = dot(out + r * shape.out_stride, row, shape.head_dim);
  }
  zero(s.queries + shape.queries * s.width, (padded - shape.queries) * s.width);
  zero(s.dout + shape.queries * s.width, (padded - shape.queries) * s.width);
  zero(s.dq, padded * s.width);
}

// One block of queries against one chunk of keys.
inline void backward_block(const AttentionShape& shape, const BackwardScratch& s, std::size_t query,
                           std::size_t key, const float* lse, const float* delta) {
  const std::size_t rows = least(kQueryBlock, shape.queries - query);
  const std::size_t tiled = round_up(rows, kTileRows);
  const std::size_t key_end = least(key + kKeyChunk, query + rows);
  const std::size_t width = s.width;
  const auto at = [width](float* rows_of, std::size_t row) { return rows_of + row * width; };

  score_tiles(at(s.queries, query), width, shape.head_dim, tiled, query, s.key_panels, key, key_end,
              s.scores, kKeyChunk);
  score_tiles(at(s.dout, query), width, shape.head_dim, tiled, query, s.value_panels, key, key_end,
              s.dscores, kKeyChunk);
  for (std::size_t r = 0; r < rows; ++r) {
    softmax_backward(s.scores + r * kKeyChunk, s.dscores + r * kKeyChunk,
                     least(key_end, query + r + 1) - key, lse[query + r], delta[query + r]);
  }
  for (std::size_t r = rows; r < tiled; ++r) zero(s.dscores + r * kKeyChunk, key_end - key);

  for (std::size_t r = 0; r < tiled; r += kTileRows) {
    const std::size_t depth = least(key_end, query + r + kTileRows) - key;
    for (std::size_t col = 0; col < width; col += kPanel) {
      tile<false, Sum::kContinue>(depth, {s.dscores + r * kKeyChunk, kKeyChunk},
                                  {at(s.keys, key) + col, width}, at(s.dq, query + r) + col, width);
    }
  }
  for (std::size_t k = key; k < key_end; k += kTileRows) {
    const std::size_t above = k > query ? k - query : 0;  // queries that do not see the key
    const std::size_t depth = rows - above;
    const std::size_t place = above * kKeyChunk + (k - key);
    for (std::size_t col = 0; col < width; col += kPanel) {
      tile<true, Sum::kContinue>(depth, {s.scores + place, kKeyChunk},
                                 {at(s.dout, query + above) + col, width}, at(s.dv, k) + col,
                                 width);
      tile<true, Sum::kContinue>(depth, {s.dscores + place, kKeyChunk},
                                 {at(s.queries, query + above) + col, width}, at(s.dk, k) + col,
                                 width);
    }
  }
}

void attention_backward(const AttentionBackward& call) {
  const AttentionShape& shape = call.shape;
  const BackwardScratch s = split_scratch(call.scratch, shape.queries, shape.head_dim);
  pack_keys(call, s);
  for (std::size_t head = 0; head < shape.group; ++head) {
    const float* lse = call.lse + head * shape.queries;
    pack_queries(call, head, s);
    for (std::size_t key = 0; key < shape.queries; key += kKeyChunk) {
      for (std::size_t query = key; query < shape.queries; query += kQueryBlock) {
        backward_block(shape, s, query, key, lse, s.delta);
      }
    }
    write_dq(call, head, s.dq, s.width);
  }
  write_dk_dv(call, s.dk, s.dv, s.width);
}

}  // namespace
}  // namespace lockstep
