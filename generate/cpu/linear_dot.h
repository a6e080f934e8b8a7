// Linear layers with bfloat16 weights in products of pairs of inputs: the way DOT of linear_bf16.h.
#pragma once
#include "panels.h"

// R rows from `row` on times `count` pairs of inputs of a panel, from pair `from` on, are added to sums.
INLINE void dot_block(const Task *t, int64_t row, const char *w, int64_t from, int64_t count, int R, float *sums,
                      Ahead ahead) {
  const int64_t k = t->k;
  const bf16 *x = t->x + row * k + 2 * from;
  __m512 acc[6][4];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 4; j++) acc[r][j] = from ? _mm512_load_ps(sums + r * PANEL + 16 * j) : _mm512_setzero_ps();
  for (int64_t i = 0; i < 2 * count; i += 2) {
    __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 64);
    __m512bh w2 = (__m512bh)_mm512_loadu_si512(w + 128), w3 = (__m512bh)_mm512_loadu_si512(w + 192);
    w += 256;
    fetch_step(&ahead);
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
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 4; j++) _mm512_store_ps(sums + r * PANEL + 16 * j, acc[r][j]);
}

static void dot_rows(const Task *t, int64_t row, int64_t rows, const char *w, int64_t from, int64_t count, float *sums,
                     Ahead ahead) {
  switch (rows) {
    case 1: dot_block(t, row, w, from, count, 1, sums, ahead); break;
    case 2: dot_block(t, row, w, from, count, 2, sums, ahead); break;
    case 3: dot_block(t, row, w, from, count, 3, sums, ahead); break;
    case 4: dot_block(t, row, w, from, count, 4, sums, ahead); break;
    case 5: dot_block(t, row, w, from, count, 5, sums, ahead); break;
    default: dot_block(t, row, w, from, count, 6, sums, ahead);
  }
}

// Rows first up to last times panel p; meanwhile `bytes` from `next` on are fetched. Several blocks of rows take a
// slice of the panel one after the other, while it lies in the first-level cache and the next slice is fetched.
static void dot_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  float sums[BAND * PANEL] __attribute__((aligned(64)));
  const int64_t pairs = t->k / 2, blocks = (last - first + 5) / 6, most = blocks == 1 ? pairs : SLICE_BYTES / PAIR;
  const char *w = (const char *)t->w->packed + p * pairs * PAIR;
  for (int64_t from = 0; from < pairs; from += most) {
    const Slice s = slice_at(w, from, pairs, most, PAIR, next, bytes);
    for (int64_t b = 0, row = first; b < blocks; b++, row += 6)
      dot_rows(t, row, last - row, s.w, from, s.count, sums + (row - first) * PANEL,
               share_of(s.then, s.bytes, b, blocks, s.count));
  }
  put_rows(t, first, last - first, p, sums);
}

