// Linear layers with bfloat16 weights, in three ways. TILES: processors with AMX (Sapphire Rapids and later) multiply
// tiles of 16 rows, 32 inputs and 16 outputs, at ten times the arithmetic rate of AVX-512. DOT multiplies pairs of
// inputs in vectors. FMA widens weights and inputs to float32 in registers; it runs on most processors, and on some of
// those that have DOT it is twice as fast. A process takes one way for all numbers of rows, and the order in which an
// output is summed depends on that and K alone: not on the number of rows, not on threads.
//
// A panel is [K/2][64][2], so that it is read straight through and a pair of inputs meets 64 outputs in four registers,
// 16 pairs in four tiles.
#pragma once
#include "panels.h"

#if defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };  // of arch_prctl
#endif

#if LANES == 16
enum { FMA_ROWS = 12, FMA_SUMS = 24 };  // rows of a block, and registers for its sums
#elif LANES == 8
enum { FMA_ROWS = 6, FMA_SUMS = 12 };
#else
enum { FMA_ROWS = 6, FMA_SUMS = 24 };
#endif
enum { CHUNK = 256 };  // inputs that are widened at once

static int way = FMA;

int packed_linear_has(int wanted) {
  if (wanted == FMA) return HAS_FMA;
#ifdef __AVX512BF16__
  if (wanted == DOT) return 1;
#endif
#ifdef HAS_TILES
  if (wanted == TILES) return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#endif
  return 0;
}

// Tiles without the system's permission are an illegal instruction, so it is asked for here, too.
int packed_linear_use(int wanted) {
  int possible = packed_linear_has(wanted);
  if (possible) way = wanted;
  return possible;
}

static int64_t bfloat16_panel_bytes(int64_t k) { return PANEL * k * 2; }

static void bfloat16_pack_panel(const void *weight, char *packed, int64_t p, int64_t n, int64_t k, int gated) {
  const bf16 *w = weight;
  bf16 *to = (bf16 *)packed;
  for (int64_t i = 0; i < k / 2; i++)
    for (int64_t j = 0; j < PANEL; j++, to += 2) {
      int64_t row = packed_row(p * PANEL + j, n, gated);
      to[0] = row < n ? w[row * k + 2 * i] : 0;
      to[1] = row < n ? w[row * k + 2 * i + 1] : 0;
    }
}

// R rows from `row` on times one panel. `next` is a stretch of the next panel to fetch, `lines` of it at each pair. Few
// rows take more outputs at once, so that sums fill the registers. An output's products are added in the same order.
INLINE void fma_block(const Task *t, int64_t row, int64_t p, int R, const char *next, int lines) {
  const int all = PANEL / LANES, V = R * all <= FMA_SUMS ? all : R * all <= 2 * FMA_SUMS ? all / 2 : all / 4;
  const char *panel = (const char *)t->w->packed + p * bfloat16_panel_bytes(t->k);
  float x[FMA_ROWS][CHUNK] __attribute__((aligned(64))), sums[FMA_ROWS][PANEL] __attribute__((aligned(64)));
  for (int part = 0; part < all; part += V) {
    const char *w = panel + part * sizeof(vec);
    vec acc[FMA_ROWS][PANEL / LANES];
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int j = 0; j < V; j++) acc[r][j] = (vec){0};
    for (int64_t from = 0; from < t->k; from += CHUNK) {
      int64_t count = t->k - from < CHUNK ? t->k - from : CHUNK;
      for (int r = 0; r < R; r++)
        for (int64_t i = 0; i < count; i += LANES)
          store_floats(x[r] + i, load_bf16(t->x + (row + r) * t->k + from + i, count - i), LANES);
      for (int64_t i = 0; i < count; i += 2, w += 4 * PANEL) {
        uvec pair[PANEL / LANES];
        UNROLL for (int j = 0; j < V; j++) memcpy(&pair[j], w + j * sizeof(vec), sizeof(vec));
        if (part == 0) next = fetch(next, lines);
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int j = 0; j < V; j++) acc[r][j] = fused(all_of(x[r][i]), (vec)(pair[j] << 16), acc[r][j]);
        UNROLL for (int r = 0; r < R; r++)
          UNROLL for (int j = 0; j < V; j++)
            acc[r][j] = fused(all_of(x[r][i + 1]), (vec)(pair[j] & 0xffff0000), acc[r][j]);
      }
    }
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int j = 0; j < V; j++) store_floats(sums[r] + (part + j) * LANES, acc[r][j], LANES);
  }
  for (int r = 0; r < R; r++) put_panel(t, row + r, p, sums[r]);
}

// Rows first up to last times panel p; meanwhile `bytes` from `next` on are fetched.
static void fma_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  int64_t blocks = (last - first + FMA_ROWS - 1) / FMA_ROWS;
  int lines = (int)((4 + blocks - 1) / blocks);
  int64_t stretch = t->k / 2 * 64 * lines;
  for (int64_t row = first; row < last; row += FMA_ROWS, next += stretch, bytes -= stretch) {
    int n = bytes >= stretch ? lines : 0;
    switch (last - row) {
      case 1: fma_block(t, row, p, 1, next, n); break;
      case 2: fma_block(t, row, p, 2, next, n); break;
      case 3: fma_block(t, row, p, 3, next, n); break;
      case 4: fma_block(t, row, p, 4, next, n); break;
      case 5: fma_block(t, row, p, 5, next, n); break;
#if LANES == 16
      case 6: fma_block(t, row, p, 6, next, n); break;
      case 7: fma_block(t, row, p, 7, next, n); break;
      case 8: fma_block(t, row, p, 8, next, n); break;
      case 9: fma_block(t, row, p, 9, next, n); break;
      case 10: fma_block(t, row, p, 10, next, n); break;
      case 11: fma_block(t, row, p, 11, next, n); break;
#endif
      default: fma_block(t, row, p, FMA_ROWS, next, n);
    }
  }
}

#ifdef __AVX512BF16__
// R rows from `row` on times one panel. `next` is a stretch of the next panel to fetch, `lines` of it at each pair.
INLINE void dot_block(const Task *t, int64_t row, int64_t p, int R,
                                                               const char *next, int lines) {
  const int64_t k = t->k;
  const bf16 *x = t->x + row * k;
  const char *w = (const char *)t->w->packed + p * bfloat16_panel_bytes(k);
  __m512 acc[6][4];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 4; j++) acc[r][j] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 2) {
    __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 64);
    __m512bh w2 = (__m512bh)_mm512_loadu_si512(w + 128), w3 = (__m512bh)_mm512_loadu_si512(w + 192);
    w += 256;
    next = fetch(next, lines);
    for (int r = 0; r < R; r++) {
      int32_t pair;
      memcpy(&pair, x + r * k + i, 4);
      __m512bh b = (__m512bh)_mm512_set1_epi32(pair);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], b, w0);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], b, w1);
      acc[r][2] = _mm512_dpbf16_ps(acc[r][2], b, w2);
      acc[r][3] = _mm512_dpbf16_ps(acc[r][3], b, w3);
    }
  }
  for (int r = 0; r < R; r++) {
    float sums[PANEL] __attribute__((aligned(64)));
    for (int j = 0; j < 4; j++) _mm512_store_ps(sums + 16 * j, acc[r][j]);
    put_panel(t, row + r, p, sums);
  }
}

// Rows first up to last times panel p; meanwhile `bytes` from `next` on are fetched.
static void dot_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  int64_t blocks = (last - first + 5) / 6;
  int lines = (int)((4 + blocks - 1) / blocks);
  int64_t stretch = t->k / 2 * 64 * lines;
  for (int64_t row = first; row < last; row += 6, next += stretch, bytes -= stretch) {
    int n = bytes >= stretch ? lines : 0;
    switch (last - row) {
      case 1: dot_block(t, row, p, 1, next, n); break;
      case 2: dot_block(t, row, p, 2, next, n); break;
      case 3: dot_block(t, row, p, 3, next, n); break;
      case 4: dot_block(t, row, p, 4, next, n); break;
      case 5: dot_block(t, row, p, 5, next, n); break;
      default: dot_block(t, row, p, 6, next, n);
    }
  }
}

#ifdef HAS_TILES
enum { ROWS = 16 };  // of a tile

// Tiles 0-3 hold sums, 4 holds rows of x, all there are or 16, 5-7 weights: 16 pairs of inputs by 16 outputs; where
// there are more than 16 rows, 5 holds the next 16 of them.
static void configure_tiles(int64_t m) {
  uint8_t rows = m < ROWS ? (uint8_t)m : ROWS;
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {rows, rows, rows, rows, rows, ROWS, ROWS, ROWS}};
  __asm__ volatile("" : : "r"(&config) : "memory");  // the intrinsic declares that it reads only the first bytes
  _tile_loadconfig(&config);
}

// 16 rows of x, or all, times 64 outputs. `lines` of `ahead` are fetched after each tile, which a row of fetches would
// hold up.
static void tile_block(const bf16 *x, const char *w, int64_t k, float *sums, const char *ahead, int lines) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < k; i += 32, w += 4096) {
    _tile_loadd(4, x + i, 2 * k);
    _tile_loadd(5, w, 256);
    _tile_dpbf16ps(0, 4, 5);
    ahead = fetch(ahead, lines);
    _tile_loadd(6, w + 64, 256);
    _tile_dpbf16ps(1, 4, 6);
    ahead = fetch(ahead, lines);
    _tile_loadd(7, w + 128, 256);
    _tile_dpbf16ps(2, 4, 7);
    ahead = fetch(ahead, lines);
    _tile_loadd(5, w + 192, 256);
    _tile_dpbf16ps(3, 4, 5);
    ahead = fetch(ahead, lines);
  }
  _tile_stored(0, sums, 4 * PANEL);
  _tile_stored(1, sums + 16, 4 * PANEL);
  _tile_stored(2, sums + 32, 4 * PANEL);
  _tile_stored(3, sums + 48, 4 * PANEL);
}

// Twice 16 rows times 32 outputs, so that every tile that is loaded is used twice; sums as by two tile_block.
static void tile_square(const bf16 *x, const bf16 *below, const char *w, int64_t k, float *sums, const char *ahead,
                        int lines) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < k; i += 32, w += 4096) {
    _tile_loadd(6, w, 256);
    _tile_loadd(4, x + i, 2 * k);
    _tile_dpbf16ps(0, 4, 6);
    ahead = fetch(ahead, lines);
    _tile_loadd(5, below + i, 2 * k);
    _tile_dpbf16ps(2, 5, 6);
    ahead = fetch(ahead, lines);
    _tile_loadd(7, w + 64, 256);
    _tile_dpbf16ps(1, 4, 7);
    ahead = fetch(ahead, lines);
    _tile_dpbf16ps(3, 5, 7);
    ahead = fetch(ahead, lines);
  }
  _tile_stored(0, sums, 4 * PANEL);
  _tile_stored(1, sums + 16, 4 * PANEL);
  _tile_stored(2, sums + ROWS * PANEL, 4 * PANEL);
  _tile_stored(3, sums + ROWS * PANEL + 16, 4 * PANEL);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// As dot_panel. All blocks have 16 rows if there are that many: the last begins within the one before it.
static void tile_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  const int64_t k = t->k, step = k / 32 * 64, blocks = (last - first + ROWS - 1) / ROWS;  // step: fetched at a line each
  const int lines = (int)((16 + blocks - 1) / blocks);
  const int64_t final = t->m < ROWS ? 0 : t->m - ROWS;
  const char *w = (const char *)t->w->packed + p * bfloat16_panel_bytes(k);
  float sums[2 * ROWS][PANEL] __attribute__((aligned(64)));
  for (int64_t row = first; row < last; row += 2 * ROWS) {
    int64_t top = smaller(row, final), second = smaller(row + ROWS, final), end = smaller(row + 2 * ROWS, last);
    int n = bytes > 0 ? (lines + 3) / 4 : 0;
    if (row + ROWS < last) {
      tile_square(t->x + top * k, t->x + second * k, w, k, sums[0], next, n);
      next += 4 * n * step;
      bytes -= 4 * n * step;
      tile_square(t->x + top * k, t->x + second * k, w + 128, k, sums[0] + 32, next, bytes > 0 ? n : 0);
    } else {
      tile_block(t->x + top * k, w, k, sums[0], next, n);
    }
    next += 4 * n * step;
    bytes -= 4 * n * step;
    for (int64_t r = row; r < end; r++) put_panel(t, r, p, r < row + ROWS ? sums[r - top] : sums[ROWS + r - second]);
  }
}
#endif
#endif

static void bfloat16_begin(const Task *t) {
#ifdef HAS_TILES
  if (way == TILES && t->k % 32 == 0) configure_tiles(t->m);
#endif
}

static void bfloat16_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
#ifdef HAS_TILES
  if (way == TILES && t->k % 32 == 0) return tile_panel(t, p, first, last, next, bytes);
#endif
#ifdef __AVX512BF16__
  if (way != FMA) return dot_panel(t, p, first, last, next, bytes);
#endif
  fma_panel(t, p, first, last, next, bytes);
}

static void bfloat16_end(const Task *t) {
#ifdef HAS_TILES
  if (way == TILES && t->k % 32 == 0) _tile_release();  // tiles in use are saved at every task switch
#endif
}
