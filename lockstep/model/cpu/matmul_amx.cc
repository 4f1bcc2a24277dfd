// Products of bf16 with the tile instructions of AMX. A tile register holds 16 rows of 64 bytes: 16
// x 32 elements of a, 16 pairs of k by 16 columns of b (the two k of a pair side by side), or 16 x
// 16 sums in f32.

#include "lockstep/model/cpu/avx512.h"
#include "lockstep/model/cpu/matmul_kernel.h"

namespace lockstep {
namespace {

constexpr std::size_t kSide = 16;         // rows of a tile, and columns of one of sums
constexpr std::size_t kStep = 32;         // k that one instruction takes
constexpr std::size_t kTileFloats = 256;  // 1 KiB
constexpr std::size_t kStripRows = 2 * kSide;
constexpr std::size_t kPanelCols = 2 * kSide;
// Two tiles per step of k; a cache line more, so that neighbours use different sets of the cache.
constexpr std::size_t kFloats = kMaxDepthBlock / kStep * 2 * kTileFloats + 16;
static_assert(kMaxDepthBlock % kStep == 0);

// The first n lanes, n may be more than there are.
__mmask16 first(std::size_t n) {
  return static_cast<__mmask16>(n >= kSide ? 0xffffu : (1u << n) - 1u);
}

std::size_t left(std::size_t end, std::size_t at) { return at < end ? end - at : 0; }

// 32 neighbours in memory, of which `count` exist.
__m512i round_line(const float* from, std::size_t count) {
  const __m512 low = _mm512_maskz_loadu_ps(first(count), from);
  const __m512 high = _mm512_maskz_loadu_ps(first(left(count, kSide)), from + kSide);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// 16 columns of two lines, of which `lines` exist: both values of a column side by side.
__m512i round_pair(const float* from, std::size_t stride, std::size_t lines, std::size_t cols) {
  const __m512 even = _mm512_maskz_loadu_ps(lines > 0 ? first(cols) : 0, from);
  const __m512 odd = _mm512_maskz_loadu_ps(lines > 1 ? first(cols) : 0, from + stride);
  const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
  alignas(64) static constexpr std::uint16_t kOrder[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves);
}

// A tile from a matrix that is contiguous along k: line i of the tile is line i of the matrix.
void tile_of_lines(const float* from, std::size_t stride, std::size_t lines, std::size_t depth,
                   bool turn, float* to) {
  __m512 tile[kSide];
  for (std::size_t i = 0; i < kSide; ++i) {
    tile[i] =
        i < lines ? _mm512_castsi512_ps(round_line(from + i * stride, depth)) : _mm512_setzero_ps();
  }
  if (turn) transpose16(tile);
  for (std::size_t i = 0; i < kSide; ++i) _mm512_storeu_ps(to + i * kSide, tile[i]);
}

// A tile from a matrix that is contiguous across k: line i of the tile is the pair of k 2i, 2i + 1.
void tile_of_pairs(const float* from, std::size_t stride, std::size_t cols, std::size_t depth,
                   bool turn, float* to) {
  __m512 tile[kSide];
  for (std::size_t i = 0; i < kSide; ++i) {
    tile[i] =
        _mm512_castsi512_ps(round_pair(from + 2 * i * stride, stride, left(depth, 2 * i), cols));
  }
  if (turn) transpose16(tile);
  for (std::size_t i = 0; i < kSide; ++i) _mm512_storeu_ps(to + i * kSide, tile[i]);
}

// Rows of a are lines of a tile; columns of b are columns of pairs.
void pack(const Operand& matrix, bool contiguous_k, bool turn, std::size_t at, std::size_t count,
          const DepthBlock& block, float* to) {
  for (std::size_t done = 0; done < block.depth; done += kStep) {
    for (std::size_t half = 0; half < 2; ++half, to += kTileFloats) {
      const std::size_t here = left(count, half * kSide);
      const std::size_t side = at + (here > 0 ? half * kSide : 0);
      if (contiguous_k) {
        tile_of_lines(matrix.data + side * matrix.stride + block.k + done, matrix.stride, here,
                      block.depth - done, turn, to);
      } else {
        tile_of_pairs(matrix.data + (block.k + done) * matrix.stride + side, matrix.stride, here,
                      block.depth - done, turn, to);
      }
    }
  }
}

void pack_strips(const Operand& a, std::size_t, const RowBlock& rows, const DepthBlock& block,
                 float* strips) {
  // Tiles are configured per thread, and every task begins here.
  static constexpr TileConfig kConfig;
  _tile_loadconfig(&kConfig);
  for (std::size_t s = 0; s < rows.strips; ++s) {
    const std::size_t begin = s * rows.rows / rows.strips;
    const std::size_t end = (s + 1) * rows.rows / rows.strips;
    pack(a, !a.transposed, a.transposed, rows.row + begin, end - begin, block,
         strips + s * kFloats);
  }
}

void pack_panels(const Operand& b, std::size_t col, std::size_t cols, const DepthBlock& block,
                 float* panels) {
  for (std::size_t done = 0; done < cols; done += kPanelCols, panels += kFloats) {
    pack(b, b.transposed, b.transposed, col + done,
         cols - done < kPanelCols ? cols - done : kPanelCols, block, panels);
  }
}

// Sums begin at `add`, in every tile alike.
void multiply_tile(const float* strip, const float* panel, std::size_t depth, bool low_rows,
                   const TileOut& to) {
  all_memory_is_used();
  const std::size_t bytes = to.stride * sizeof(float);
  if (to.add) {
    _tile_loadd(0, to.add, bytes);
    _tile_loadd(1, to.add + kSide, bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if (low_rows && to.add) {
    _tile_loadd(2, to.add + kSide * to.stride, bytes);
    _tile_loadd(3, to.add + kSide * to.stride + kSide, bytes);
  } else {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::size_t done = 0; done < depth; done += kStep) {
    _tile_loadd(4, strip, 64);
    _tile_loadd(6, panel, 64);
    _tile_loadd(7, panel + kTileFloats, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (low_rows) {
      _tile_loadd(5, strip + kTileFloats, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    strip += 2 * kTileFloats;
    panel += 2 * kTileFloats;
  }
  _tile_stored(0, to.out, bytes);
  _tile_stored(1, to.out + kSide, bytes);
  if (low_rows) {
    _tile_stored(2, to.out + kSide * to.stride, bytes);
    _tile_stored(3, to.out + kSide * to.stride + kSide, bytes);
  }
  all_memory_is_used();
}

void multiply(const float* strip, const float* panel, std::size_t depth, std::size_t rows,
              std::size_t cols, const TileOut& to) {
  if (rows == kStripRows && cols == kPanelCols) {
    multiply_tile(strip, panel, depth, true, to);
    return;
  }
  // At the edge: the same instructions into a whole tile of our own.
  alignas(64) float whole[kStripRows * kPanelCols] = {};
  if (to.add) {
    for (std::size_t i = 0; i < rows; ++i) {
      for (std::size_t j = 0; j < cols; ++j) whole[i * kPanelCols + j] = to.add[i * to.stride + j];
    }
  }
  multiply_tile(strip, panel, depth, rows > kSide,
                {.out = whole,
                 .add = to.add ? whole : nullptr,
                 .stride = kPanelCols,
                 .ahead = nullptr,
                 .ahead_step = 0,
                 .source = {}});
  for (std::size_t i = 0; i < rows; ++i) {
    for (std::size_t j = 0; j < cols; ++j) to.out[i * to.stride + j] = whole[i * kPanelCols + j];
  }
}

}  // namespace

const MatmulKernel kMatmulAmx = {
    .name = "AMX bf16",
    .precision = Precision::kBf16,
    .strip_rows = kStripRows,
    .panel_cols = kPanelCols,
    .strip_floats = kFloats,
    .panel_floats = kFloats,
    .pack_strips = &pack_strips,
    .pack_panels = &pack_panels,
    .multiply = &multiply,
};

}  // namespace lockstep
