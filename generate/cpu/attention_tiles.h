// Attention of 16 queries at a time in AMX's tiles, for bfloat16 heads of a multiple of 64 values: a part of
// paged_attention.c. The pools' order of values is that of a tile's second factor: 16 pairs by 16 keys, or by 16
// columns.
#pragma once
#include "attention_fma.h"
#include "tiles.h"

#if HAS_TILES
INLINE void fetch_tile(const char *from, long stride) {
  UNROLL for (int r = 0; r < 16; r++) __builtin_prefetch(from + r * stride);
}

// Add the products of the tile at `a`, of queries or weights, and the four at `b` to tiles 0-3. Meanwhile the four at
// `ahead` are fetched, or nothing for null.
INLINE void multiply(const void *a, long a_stride, const char *const *b, long b_stride, const char *const *ahead) {
  _tile_loadd(4, a, a_stride);
  _tile_loadd(5, b[0], b_stride);
  _tile_dpbf16ps(0, 4, 5);
  if (ahead) fetch_tile(ahead[0], b_stride);
  _tile_loadd(6, b[1], b_stride);
  _tile_dpbf16ps(1, 4, 6);
  if (ahead) fetch_tile(ahead[1], b_stride);
  _tile_loadd(7, b[2], b_stride);
  _tile_dpbf16ps(2, 4, 7);
  if (ahead) fetch_tile(ahead[2], b_stride);
  _tile_loadd(5, b[3], b_stride);
  _tile_dpbf16ps(3, 4, 5);
  if (ahead) fetch_tile(ahead[3], b_stride);
}

static void clear_sums(void) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

static void store_sums(float *to, long stride) {
  _tile_stored(0, to, 4 * stride);
  _tile_stored(1, to + 16, 4 * stride);
  _tile_stored(2, to + 32, 4 * stride);
  _tile_stored(3, to + 48, 4 * stride);
}

static void score_tiles(const Call *c, const Queries *t, float *scores, int stream) {
  int D = c->D, blocks = (t->keys + BLOCK - 1) / BLOCK;
  uint16_t q[TILE_QUERIES * MAX_HEAD_SIZE] __attribute__((aligned(64)));
  for (int i = 0; i < TILE_QUERIES; i++) memcpy(q + i * D, query_values(c, t->at[i]), 2 * (size_t)D);
  for (int b = 0; b < blocks; b += AHEAD) {
    const char *key[AHEAD], *ahead[AHEAD];
    for (int j = 0; j < AHEAD; j++) {
      key[j] = block_at(c, c->keys, t->pages, t->head, b + j < blocks ? b + j : blocks - 1);
      if (stream) ahead[j] = stream_at(c, t->pages, t->head, blocks, b + j + FAR);
    }
    clear_sums();
    for (int d = 0; d < D; d += TERMS) {
      multiply(q + d, 2 * D, key, 64, stream ? ahead : 0);
      for (int j = 0; j < AHEAD; j++) {
        key[j] += 64 * 16;
        if (stream) ahead[j] += 64 * 16;
      }
    }
    store_sums(scores + b * BLOCK, c->stride);
  }
}

// The last n % 32 values of a head, and zeros in place of the stale ones behind them.
static void copy_tail(const Call *c, const Queries *t, uint32_t *tail) {
  int D = c->D, n = t->keys, first = n / TERMS * TERMS;
  memset(tail, 0, TERMS / 2 * 4 * (size_t)D);
  if (first == n) return;
  const uint32_t *values = (const uint32_t *)block_at(c, c->values, t->pages, t->head, first / BLOCK);
  memcpy(tail, values, (n - first + 1) / 2 * 4 * (size_t)D);
  if (n % 2)
    for (int d = 0; d < D; d++) tail[(n - first) / 2 * D + d] &= 0xffff;
}

// As attend(). Pages must hold a multiple of 32 tokens.
static void attend_tiles(const Call *c, const Queries *t, float *scores, int stream) {
  int D = c->D, n = t->keys, blocks = (n + BLOCK - 1) / BLOCK, end = (n + TERMS - 1) / TERMS * TERMS;
  float sums[TILE_QUERIES], out[TILE_QUERIES][64] __attribute__((aligned(64)));
  uint32_t tail[TERMS / 2 * MAX_HEAD_SIZE] __attribute__((aligned(64)));
  score_tiles(c, t, scores, stream);
  for (int i = 0; i < t->count; i++)
    sums[i] = softmax_pairs(c, scores + i * c->stride, t->at[i], end, 0);
  copy_tail(c, t, tail);
  for (int d0 = 0; d0 < D; d0 += 64) {
    clear_sums();
    for (int k = 0; k < n; k += TERMS) {
      const char *value = k + TERMS <= n ? block_at(c, c->values, t->pages, t->head, k / BLOCK) : (const char *)tail;
      const char *next = stream ? stream_at(c, t->pages, t->head, blocks, blocks + (k + TERMS) / BLOCK) : value;
      const char *columns[4], *ahead[4];
      for (int j = 0; j < 4; j++) columns[j] = value + 4 * d0 + 64 * j, ahead[j] = next + 4 * d0 + 64 * j;
      multiply((uint16_t *)scores + k, 4 * c->stride, columns, 4 * D, stream ? ahead : 0);
    }
    store_sums(out[0], 64);
    for (int i = 0; i < t->count; i++) {
      __m512 acc[4];
      for (int j = 0; j < 4; j++) acc[j] = _mm512_load_ps(out[i] + 16 * j);
      put_outputs(c, t->at[i], d0, acc, 4, sums[i]);
    }
  }
}
#else
static void attend_tiles(const Call *c, const Queries *t, float *scores, int stream) {}
#endif
