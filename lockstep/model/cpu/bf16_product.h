// Products of bf16 matrices with f32 sums, for bf16_attention_v4.cc. A *word* is 32 bits: two bf16
// that follow each other along the depth of a product, the first in the low half. A left-hand
// matrix has rows of depth / 2 words. A right-hand one has panels of 16 columns; a panel is depth /
// 2 rows of 16 words.
#pragma once

#include "lockstep/model/cpu/attention_parts.h"

namespace lockstep {
namespace {

constexpr std::size_t kUnit = 32;  // rows, columns and depth of a product are multiples
constexpr std::size_t kPanelWords = 16;

using Word = float;  // what it holds is never used as a number

struct Bf16Product {
  std::size_t rows, cols, depth;
  const Word* a;
  std::size_t a_stride;  // words
  const Word* b;
  std::size_t b_panel;  // words from one panel to the next
  float* c;
  std::size_t c_stride;
  bool add;  // c += a·b, else c = a·b
};

// Rounded to nearest even: the upper half of each word is the bf16.
inline __m512i rounded(Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}

// 16 words of one element of each.
inline Vec paired(Vec first_half, Vec second_half) {
  const __m512i low = _mm512_srli_epi32(rounded(first_half), 16);
  const __m512i high =
      _mm512_and_si512(rounded(second_half), _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  return _mm512_castsi512_ps(_mm512_or_si512(low, high));
}

// count f32 side by side, a multiple of 16, to count / 2 words.
inline void to_words(const float* values, std::size_t count, Word* words) {
  for (std::size_t i = 0; i < count; i += kWidth) {
    const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(load(values + i)), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + i / 2), half);
  }
}

// Sixteen rows of `words` words each become a panel whose columns they are.
inline void rows_to_panel(const Word* rows, std::size_t words, Word* panel) {
  for (std::size_t i = 0; i < words; i += kPanelWords) {
    transpose16(rows + i, words, panel + i * kPanelWords, kPanelWords);
  }
}

// Two f32 rows of `width` become row `pair` of the panels of a matrix with `depth` rows.
inline void pair_to_panels(const float* even, const float* odd, std::size_t width,
                           std::size_t depth, std::size_t pair, Word* panels) {
  for (std::size_t i = 0; i < width; i += kPanelWords) {
    store(panels + i * depth / 2 + pair * kPanelWords, paired(load(even + i), load(odd + i)));
  }
}

// The transpose of f32 rows, `rows` x `cols` and multiples of 32, as a left-hand matrix.
inline void transposed_words(const float* values, std::size_t stride, std::size_t rows,
                             std::size_t cols, Word* words, std::size_t words_stride) {
  alignas(64) Word pairs[16 * 16];
  for (std::size_t r = 0; r < rows; r += 32) {
    for (std::size_t c = 0; c < cols; c += 16) {
      for (std::size_t i = 0; i < 16; ++i) {
        const float* row = values + (r + 2 * i) * stride + c;
        store(pairs + i * 16, paired(load(row), load(row + stride)));
      }
      transpose16(pairs, 16, words + c * words_stride + r / 2, words_stride);
    }
  }
}

// The matrix unit: eight tiles of 16 rows of 64 bytes. Four hold sums, two each of a and b.
struct AmxProducts {
  // Of the calling thread.
  [[gnu::target("amx-tile")]] static void begin() {
    static constexpr TileConfig kConfig;
    _tile_loadconfig(&kConfig);
  }

  [[gnu::target("amx-tile,amx-bf16")]] static void multiply(const Bf16Product& p) {
    constexpr std::size_t kTile = 16;
    all_memory_is_used();
    const std::size_t a_bytes = p.a_stride * sizeof(Word);
    const std::size_t c_bytes = p.c_stride * sizeof(float);
    for (std::size_t col = 0; col < p.cols; col += kUnit) {
      const Word* b = p.b + col / kPanelWords * p.b_panel;
      for (std::size_t row = 0; row < p.rows; row += kUnit) {
        const Word* a = p.a + row * p.a_stride;
        float* c = p.c + row * p.c_stride + col;
        float* below = c + kTile * p.c_stride;
        if (p.add) {
          _tile_loadd(0, c, c_bytes);
          _tile_loadd(1, c + kTile, c_bytes);
          _tile_loadd(2, below, c_bytes);
          _tile_loadd(3, below + kTile, c_bytes);
        } else {
          _tile_zero(0);
          _tile_zero(1);
          _tile_zero(2);
          _tile_zero(3);
        }
        for (std::size_t word = 0; word < p.depth / 2; word += kTile) {
          _tile_loadd(4, a + word, a_bytes);
          _tile_loadd(5, a + kTile * p.a_stride + word, a_bytes);
          _tile_loadd(6, b + word * kPanelWords, 64);
          _tile_loadd(7, b + p.b_panel + word * kPanelWords, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c, c_bytes);
        _tile_stored(1, c + kTile, c_bytes);
        _tile_stored(2, below, c_bytes);
        _tile_stored(3, below + kTile, c_bytes);
      }
    }
    all_memory_is_used();
  }
};

// The same in plain code.
struct EmulatedProducts {
  static void begin() {}

  static float half(const Word* word, bool upper) {
    const auto bits = __builtin_bit_cast(std::uint32_t, *word);
    return __builtin_bit_cast(float, upper ? bits & 0xffff0000u : bits << 16);
  }

  static void multiply(const Bf16Product& p) {
    for (std::size_t row = 0; row < p.rows; ++row) {
      for (std::size_t col = 0; col < p.cols; ++col) {
        float& c = p.c[row * p.c_stride + col];
        float sum = p.add ? c : 0.0f;
        for (std::size_t word = 0; word < p.depth / 2; ++word) {
          const Word* a = p.a + row * p.a_stride + word;
          const Word* b =
              p.b + col / kPanelWords * p.b_panel + word * kPanelWords + col % kPanelWords;
          sum += half(a, false) * half(b, false);
          sum += half(a, true) * half(b, true);
        }
        c = sum;
      }
    }
  }
};

}  // namespace
}  // namespace lockstep
