// The matrix product on AMX tiles. A tile holds 16 rows of 64 bytes; one instruction adds the
// product of 16 x 32 and 32 x 16 bfloat16 to 16 x 16 float32. Operands are packed block by block
// into the order of the tiles, so that all loads of the inner loop hit the L2.
#include "tile_matmul.h"

#include <cstring>

// clang before 14 ends every function that uses tiles with a tilerelease, so the next function
// faults on an illegal instruction; with older compilers the tiles are not used
#if defined(__clang__)
#define FASTRL_COMPILES_TILES (__clang_major__ >= 14)
#else
#define FASTRL_COMPILES_TILES (__GNUC__ >= 12)
#endif

#if defined(__x86_64__) && defined(__linux__) && FASTRL_COMPILES_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl," \
                                                   "avx512bf16,amx-tile,amx-bf16"))),    \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")
#endif

namespace fastrl::cpu {
namespace {

constexpr int64_t kTile = 16;          // rows of a tile, columns of a float32 tile
constexpr int64_t kDepth = 32;         // terms that one instruction adds
constexpr int64_t kPanel = 2 * kTile;  // the inner loop keeps 2 x 2 tiles of the result
constexpr int64_t kBlockDepth = 512;   // terms packed at a time
constexpr int64_t kBlockColumns = 1024;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kPanelBytes = 2 * kTileBytes * (kBlockDepth / kDepth);

constexpr int64_t kPackedB = kBlockColumns / kPanel * kPanelBytes;

// (no function of the standard library: its inline code would be compiled for these instructions)
int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }

__mmask16 first(int64_t count) {
  if (count <= 0) return 0;
  return count >= kTile ? __mmask16(0xffff) : __mmask16((1u << count) - 1);
}

__mmask32 first_of_32(int64_t count) {
  return count >= kDepth ? ~__mmask32(0) : (__mmask32(1) << count) - 1;
}

// Rows of 16 pairs become columns of 16 pairs.
void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Rounds 16 floats to the nearest bfloat16, each in the low half of 32 bits.
__m512i rounded(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

__m512 remainder(__m512 x, __m512i high) {
  return _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(high, 16)));
}

__m512i pairs(__m512i even, __m512i odd) {
  return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
}

// 16 rows by 32 terms of a, row by row; `low` receives the rounding error of bfloat16.
void pack_a_tile(const Matrix& a, int64_t row, int64_t k, int64_t rows, int64_t terms,
                 __m512i* high, __m512i* low) {
  if (!a.is_float) {  // row-major
    const uint16_t* source = static_cast<const uint16_t*>(a.data) + row * a.row_stride + k;
    const __mmask32 kept = first_of_32(terms);
    for (int64_t i = 0; i < kTile; ++i) {
      high[i] = i < rows ? _mm512_maskz_loadu_epi16(kept, source + i * a.row_stride)
                         : _mm512_setzero_si512();
    }
    return;
  }
  const float* source =
      static_cast<const float*>(a.data) + row * a.row_stride + k * a.column_stride;
  if (a.column_stride == 1) {
    const __mmask16 left = first(terms), right = first(terms - kTile);
    for (int64_t i = 0; i < kTile; ++i) {
      if (i >= rows) {
        high[i] = low[i] = _mm512_setzero_si512();
        continue;
      }
      const __m512 x = _mm512_maskz_loadu_ps(left, source + i * a.row_stride);
      const __m512 y = _mm512_maskz_loadu_ps(right, source + i * a.row_stride + kTile);
      high[i] = (__m512i)_mm512_cvtne2ps_pbh(y, x);
      low[i] = (__m512i)_mm512_cvtne2ps_pbh(remainder(y, rounded(y)), remainder(x, rounded(x)));
    }
    return;
  }
  const __mmask16 kept = first(rows);
  for (int64_t pair = 0; pair < kTile; ++pair) {
    const float* column = source + 2 * pair * a.column_stride;
    const __m512 x = _mm512_maskz_loadu_ps(2 * pair < terms ? kept : 0, column);
    const __m512 y =
        _mm512_maskz_loadu_ps(2 * pair + 1 < terms ? kept : 0, column + a.column_stride);
    const __m512i x_high = rounded(x), y_high = rounded(y);
    high[pair] = pairs(x_high, y_high);
    low[pair] = pairs(rounded(remainder(x, x_high)), rounded(remainder(y, y_high)));
  }
  transpose(high);
  transpose(low);
}

// 32 terms by 16 columns of b: 16 rows, each of 16 pairs of successive terms.
void pack_b_tile(const Matrix& b, int64_t k, int64_t column, int64_t terms, int64_t columns,
                 __m512i* tile) {
  const uint16_t* source =
      static_cast<const uint16_t*>(b.data) + k * b.row_stride + column * b.column_stride;
  if (b.column_stride == 1) {
    const __mmask16 kept = first(columns);
    for (int64_t pair = 0; pair < kTile; ++pair) {
      const uint16_t* row = source + 2 * pair * b.row_stride;
      const __m256i even = _mm256_maskz_loadu_epi16(2 * pair < terms ? kept : 0, row);
      const __m256i odd =
          _mm256_maskz_loadu_epi16(2 * pair + 1 < terms ? kept : 0, row + b.row_stride);
      tile[pair] = pairs(_mm512_cvtepu16_epi32(even), _mm512_cvtepu16_epi32(odd));
    }
    return;
  }
  const __mmask32 kept = first_of_32(terms);
  for (int64_t i = 0; i < kTile; ++i) {
    tile[i] = i < columns ? _mm512_maskz_loadu_epi16(kept, source + i * b.column_stride)
                          : _mm512_setzero_si512();
  }
  transpose(tile);
}

// Forces pending writes to memory: GCC does not know what the tile instructions read.
inline void finish_writes(const void* memory) { __asm__ volatile("" ::"r"(memory) : "memory"); }

// 32 x 32 results: high and low parts of the same rows of a times the same columns of b.
template <bool kSplit>
void multiply_panels(const char* a_high, const char* a_low, const char* b, int64_t steps,
                     float* out, int64_t row_stride, bool add) {
  const int64_t stride = row_stride * 4;
  float* below = out + kTile * row_stride;
  finish_writes(out);
  if (add) {
    _tile_loadd(0, out, stride);
    _tile_loadd(1, out + kTile, stride);
    _tile_loadd(2, below, stride);
    _tile_loadd(3, below + kTile, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t at = step * 2 * kTileBytes;
    _tile_loadd(6, b + at, 64);
    _tile_loadd(7, b + at + kTileBytes, 64);
    _tile_loadd(4, a_high + at, 64);
    _tile_loadd(5, a_high + at + kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    if constexpr (kSplit) {
      _tile_loadd(4, a_low + at, 64);
      _tile_loadd(5, a_low + at + kTileBytes, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, stride);
  _tile_stored(1, out + kTile, stride);
  _tile_stored(2, below, stride);
  _tile_stored(3, below + kTile, stride);
}

// Sets the tile configuration of the thread, and restores the previous one at the end.
class TileShapes {
 public:
  TileShapes() {
    _tile_storeconfig(saved_);
    alignas(64) uint8_t config[64] = {};
    config[0] = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = 64;  // bytes of a row
      config[48 + tile] = kTile;   // rows
    }
    finish_writes(config);
    _tile_loadconfig(config);
  }
  ~TileShapes() {
    if (saved_[0] == 0) {
      _tile_release();
    } else {
      _tile_loadconfig(saved_);
    }
  }

 private:
  alignas(64) uint8_t saved_[64];
};

}  // namespace

int64_t tile_workspace_bytes() { return kPackedB + 2 * kPanelBytes; }

void tile_matmul(const Matrix& a, const Matrix& b, const MatrixOut& out, const TileTask& task,
                 bool accumulate, void* workspace) {
  const TileShapes shapes;
  char* packed_b = static_cast<char*>(workspace);
  char* high = packed_b + kPackedB;
  char* low = high + kPanelBytes;
  alignas(64) float edge[kPanel * kPanel];
  for (int64_t column = task.column_begin; column < task.column_end; column += kBlockColumns) {
    const int64_t columns = least(kBlockColumns, task.column_end - column);
    for (int64_t k = task.k_begin; k < task.k_end; k += kBlockDepth) {
      const int64_t terms = least(kBlockDepth, task.k_end - k);
      const int64_t steps = (terms + kDepth - 1) / kDepth;
      const bool add = accumulate || k > task.k_begin;
      for (int64_t n = 0; n < columns; n += kTile) {
        char* panel = packed_b + n / kPanel * kPanelBytes + n % kPanel / kTile * kTileBytes;
        for (int64_t step = 0; step < steps; ++step) {
          pack_b_tile(b, k + step * kDepth, column + n, terms - step * kDepth, columns - n,
                      reinterpret_cast<__m512i*>(panel + step * 2 * kTileBytes));
        }
        // the panel's second half, where the columns end with its first
        if (n % kPanel == 0 && n + kTile >= columns) {
          for (int64_t step = 0; step < steps; ++step) {
            memset(panel + step * 2 * kTileBytes + kTileBytes, 0, kTileBytes);
          }
        }
      }
      for (int64_t row = task.row_begin; row < task.row_end; row += kPanel) {
        const int64_t rows = least(kPanel, task.row_end - row);
        for (int64_t step = 0; step < steps; ++step) {
          for (int64_t half = 0; half < 2; ++half) {
            const int64_t at = (2 * step + half) * kTileBytes;
            pack_a_tile(a, row + half * kTile, k + step * kDepth, rows - half * kTile,
                        terms - step * kDepth, reinterpret_cast<__m512i*>(high + at),
                        reinterpret_cast<__m512i*>(low + at));
          }
        }
        for (int64_t n = 0; n < columns; n += kPanel) {
          const char* panel = packed_b + n / kPanel * kPanelBytes;
          float* target = out.data + row * out.row_stride + column + n;
          const auto multiply = a.is_float ? multiply_panels<true> : multiply_panels<false>;
          const int64_t width = least(kPanel, columns - n);
          if (rows == kPanel && width == kPanel) {
            multiply(high, low, panel, steps, target, out.row_stride, add);
            continue;
          }
          for (int64_t i = 0; add && i < rows; ++i) {
            memcpy(edge + i * kPanel, target + i * out.row_stride, width * 4);
          }
          multiply(high, low, panel, steps, edge, kPanel, add);
          for (int64_t i = 0; i < rows; ++i) {
            memcpy(target + i * out.row_stride, edge + i * kPanel, width * 4);
          }
        }
      }
    }
  }
}

}  // namespace fastrl::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

// This runs on every machine, so it must not be compiled for rare instructions.
namespace fastrl::cpu {
namespace {

bool find_tiles() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  __asm__("cpuid" : "=a"(eax), "=b"(ebx), "=c"(ecx), "=d"(edx) : "a"(7), "c"(0));
  const bool tiles = (edx >> 24 & 1) && (edx >> 22 & 1);  // AMX-TILE, AMX-BF16
  __asm__("cpuid" : "=a"(eax), "=b"(ebx), "=c"(ecx), "=d"(edx) : "a"(7), "c"(1));
  if (!tiles || !(eax >> 5 & 1)) return false;  // AVX512_BF16
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

bool has_tiles() {
  static const bool found = find_tiles();
  return found;
}

}  // namespace fastrl::cpu

#else

namespace fastrl::cpu {

bool has_tiles() { return false; }
int64_t tile_workspace_bytes() { return 0; }
void tile_matmul(const Matrix&, const Matrix&, const MatrixOut&, const TileTask&, bool, void*) {}

}  // namespace fastrl::cpu

#endif
