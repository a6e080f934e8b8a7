// Linear layers with bfloat16 weights. There are two ways. Processors with AMX (Sapphire Rapids and later) multiply tiles
// of 16 rows, 32 inputs and 16 outputs, at ten times the arithmetic rate of AVX-512; others multiply pairs of inputs in
// vectors. A process takes one way for all numbers of rows, and the order in which an output is summed depends on that
// and K alone: not on the number of rows, not on threads.
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

static int tiles;

int packed_linear_use_tiles(int wanted) {
#ifdef HAS_TILES
  tiles = wanted && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#endif
  return tiles;
}

static int64_t bfloat16_panel_bytes(int64_t k) { return PANEL * k * 2; }

static void bfloat16_pack_panel(const bf16 *w, char *packed, int64_t p, int64_t n, int64_t k, int gated) {
  bf16 *to = (bf16 *)packed;
  for (int64_t i = 0; i < k / 2; i++)
    for (int64_t j = 0; j < PANEL; j++, to += 2) {
      int64_t row = packed_row(p * PANEL + j, n, gated);
      to[0] = row < n ? w[row * k + 2 * i] : 0;
      to[1] = row < n ? w[row * k + 2 * i + 1] : 0;
    }
}

#ifdef __AVX512BF16__
// R rows from `row` on times one panel. `next` is a stretch of the next panel to fetch, `lines` of it at each pair.
INLINE void vector_block(const Task *t, int64_t row, int64_t p, int R,
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
static void vector_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  int64_t blocks = (last - first + 5) / 6;
  int lines = (int)((4 + blocks - 1) / blocks);
  int64_t stretch = t->k / 2 * 64 * lines;
  for (int64_t row = first; row < last; row += 6, next += stretch, bytes -= stretch) {
    int n = bytes >= stretch ? lines : 0;
    switch (last - row) {
      case 1: vector_block(t, row, p, 1, next, n); break;
      case 2: vector_block(t, row, p, 2, next, n); break;
      case 3: vector_block(t, row, p, 3, next, n); break;
      case 4: vector_block(t, row, p, 4, next, n); break;
      case 5: vector_block(t, row, p, 5, next, n); break;
      default: vector_block(t, row, p, 6, next, n);
    }
  }
}

#ifdef HAS_TILES
enum { ROWS = 16 };  // of a tile

// Tiles 0-3 hold sums, 4 holds rows of x, all there are or 16, 5-7 weights: 16 pairs of inputs by 16 outputs.
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

// As vector_panel. Fetches are spread between the tiles, which would otherwise wait for them. All blocks have 16 rows
// if there are that many: the last begins within the one before it.
static void tile_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  const int64_t k = t->k, blocks = (last - first + ROWS - 1) / ROWS;
  const int lines = (int)((4 + blocks - 1) / blocks);  // at each pair, as in vector_panel: 4 times that for each tile
  const int64_t stretch = k / 2 * 64 * lines;
  float sums[ROWS][PANEL] __attribute__((aligned(64)));
  for (int64_t row = first; row < last; row += ROWS, next += stretch, bytes -= stretch) {
    int64_t top = t->m < ROWS ? 0 : row < t->m - ROWS ? row : t->m - ROWS, end = row + ROWS < last ? row + ROWS : last;
    const bf16 *x = t->x + top * k;
    const char *w = (const char *)t->w->packed + p * bfloat16_panel_bytes(k), *ahead = next;
    int n = bytes >= stretch ? 4 * lines : 0;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < k; i += 32, w += 4096) {
      _tile_loadd(4, x + i, 2 * k);
      _tile_loadd(5, w, 256);
      _tile_dpbf16ps(0, 4, 5);
      ahead = fetch(ahead, n);
      _tile_loadd(6, w + 64, 256);
      _tile_dpbf16ps(1, 4, 6);
      ahead = fetch(ahead, n);
      _tile_loadd(7, w + 128, 256);
      _tile_dpbf16ps(2, 4, 7);
      ahead = fetch(ahead, n);
      _tile_loadd(5, w + 192, 256);
      _tile_dpbf16ps(3, 4, 5);
      ahead = fetch(ahead, n);
    }
    _tile_stored(0, &sums[0][0], sizeof sums[0]);
    _tile_stored(1, &sums[0][16], sizeof sums[0]);
    _tile_stored(2, &sums[0][32], sizeof sums[0]);
    _tile_stored(3, &sums[0][48], sizeof sums[0]);
    for (int64_t r = row; r < end; r++) put_panel(t, r, p, sums[r - top]);
  }
}
#else
static void configure_tiles(int64_t m) {}
static void tile_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {}
#define _tile_release() (void)0
#endif

static void bfloat16_begin(const Task *t) {
  if (tiles && t->k % 32 == 0) configure_tiles(t->m);
}

static void bfloat16_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  (tiles && t->k % 32 == 0 ? tile_panel : vector_panel)(t, p, first, last, next, bytes);
}

static void bfloat16_end(const Task *t) {
  if (tiles && t->k % 32 == 0) _tile_release();  // tiles in use are saved at every task switch
}
#endif
