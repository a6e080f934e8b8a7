// What the parts of paged_attention.c share: one call's tensors, where a block of keys lies, and single elements.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "vectors.h"

// A group of queries and of blocks that fits the machine's registers.
#if LANES == 16
#define QUERIES 8  // that share each load of a key
#define GROUP 2    // blocks of keys scored together for QUERIES queries
#define COLUMNS 4  // vectors of a value row weighed together for HALF queries
#elif LANES == 8
#define QUERIES 4
#define GROUP 1
#define COLUMNS 2
#else
#define QUERIES 4
#define GROUP 1
#define COLUMNS 4
#endif
#define LINE 64  // bytes of a cache line
#define BLOCK PAGE_MULTIPLE  // keys
#define TERMS 32             // keys, or values of a head, of a tile product
#define PARTS (BLOCK / LANES)  // vectors of a block's scores
#define TILE_QUERIES 16
#define HALF 4               // queries weighed together: their sums fill the registers
#define AHEAD 4              // blocks scored together for few queries
#define FAR 8                // blocks that are prefetched ahead of their use by the queries of one token

// The format of keys and values in the pools. KV_INT8 has a float32 scale for each token: 16 tokens are 16 * D numbers
// and then 16 scales, so a pool's rows have D + SCALE_BYTES bytes.
enum { KV_F32, KV_BF16, KV_INT8 };

INLINE int width(int format) { return format == KV_F32 ? 4 : format == KV_BF16 ? 2 : 1; }

typedef struct {
  const char *qkv;  // [M, H + 2 KV, D]
  char *keys, *values, *out;
  const int32_t *cu_seqlens, *context_lens, *block_tables;
  int n, M, H, KV, D, P, max_pages, pages;
  float scale;
  int window, unit;   // keys that a token sees, or 0 for all; a multiple of P and of TERMS
  float cap;          // of scores, or 0
  int alibi;          // heads with the slopes of ALiBi, a power of two, or 0
  uint64_t per_page, inverse;  // blocks of a page, and 2^32 over that, rounded up, since divisions take long
  int shared;                // query heads that see one head of keys: H / KV
  long block, tile, stride;  // bytes of 16 keys, bytes of a (page, head), floats of a row of scores
  int half;                  // qkv and out are bfloat16, else float32
  int format;                // of the pools: KV_INT8, or that of qkv
  int way;                   // of heads in pairs: DOT, FMA, or TILES, which is FMA for few queries
  int takes_tiles;           // some items do
  int most;                  // queries of an item: QUERIES or TILE_QUERIES
  int *items;                // [n + 1]: where each sequence's items begin
  float *scratch;            // scores, stride * most for each worker
} Call;

typedef struct {
  long row;            // packed row
  int head, position, from;  // head of queries; position of the token, and of the first key that it sees
} Query;

// Queries that share their keys: up to `most` of one sequence's new tokens, in the query heads of one head of keys.
// Those behind `count` repeat the last one and are not stored. Keys before all their windows are left out in multiples
// of `unit`, and positions count from there, so that a token's sums have one order whichever tokens are beside it.
typedef struct {
  const int32_t *pages;  // the sequence's page table, from the first page that is read
  int head, count, keys;  // head of keys; keys that the last query sees, and with it all: others weigh theirs with 0
  int hidden;             // blocks of keys that are left out
  Query at[TILE_QUERIES];
} Queries;

// How many keys the token at this position does not see.
INLINE int hidden_at(const Call *c, int position) {
  return c->window && position >= c->window ? position - c->window + 1 : 0;
}

// Cap n scores, which are to be multiplied by `scale`.
INLINE void soften(float *s, int n, float scale, float cap) {
  for (int t = 0; cap && scale && t < n; t++) s[t] = cap / scale * tanhf(s[t] * scale / cap);
}

// What a query's scores are to be multiplied by: 1 where they have been, and fell with the distance of their keys.
INLINE float lean(const Call *c, Query q, float *s, float scale) {
  if (!c->alibi) return scale;
  int h = q.head + 1;
  float slope = exp2f(-(float)(h <= c->alibi ? 8 * h : 8 * (h - c->alibi) - 4) / c->alibi);
  for (int t = 0; t <= q.position; t++) s[t] = s[t] * scale - slope * (float)(q.position - t);
  return 1;
}

INLINE const char *query_values(const Call *c, Query q) {
  return c->qkv + (q.row * (c->H + 2 * c->KV) + q.head) * c->D * (c->half ? 2 : 4);
}

INLINE char *output_of(const Call *c, Query q) {
  return c->out + (q.row * c->H + q.head) * c->D * (c->half ? 2 : 4);
}

// The new key of a packed row; its value lies KV * D elements behind it.
INLINE const char *new_key(const Call *c, long row, int h) {
  return c->qkv + (row * (c->H + 2 * c->KV) + c->H + h) * c->D * (c->half ? 2 : 4);
}

// 16 keys or values of a sequence: block number `b` of head `h`, where `row` is the sequence's page table.
INLINE char *block_at(const Call *c, char *pool, const int32_t *row, int h, int b) {
  uint64_t page = (uint64_t)b * c->inverse >> 32, rest = (uint64_t)b - page * c->per_page;
  return pool + ((long)row[page] * c->KV + h) * c->tile + (long)rest * c->block;
}

// Into the second-level cache: the first has few buffers for lines that are under way. Where memory limits, attention
// takes 0.6 of the time that it takes with prefetches into the first (Zen 4).
INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 2); }

// What a decode row reads next: its key blocks, then its value blocks, then the keys of the next head, or of the next
// sequence's first head. A shorter sequence has no such blocks: to prefetch from wherever its table points does no harm.
INLINE const char *stream_at(const Call *c, const int32_t *row, int h, int blocks, int s) {
  if (s < blocks) return block_at(c, c->keys, row, h, s);
  if (s < 2 * blocks) return block_at(c, c->values, row, h, s - blocks);
  s -= 2 * blocks;
  if (++h == c->KV) {
    h = 0;
    if (row + c->max_pages < c->block_tables + (long)c->n * c->max_pages) row += c->max_pages;
  }
  return block_at(c, c->keys, row, h, s < blocks ? s : blocks - 1);
}

INLINE float widen(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

INLINE uint16_t narrow(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (f != f) return (uint16_t)(bits >> 16 | 0x40);  // rounding up could make a NaN an infinity
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The scales of 16 tokens of a KV_INT8 pool.
INLINE float *scales_at(const Call *c, const char *block) { return (float *)(block + (long)BLOCK * c->D); }

// a * b + c, rounded once where vectors do that too: left to itself the compiler fuses some scalar loops and not
// others.
INLINE float fused_one(float a, float b, float c) { return HAS_FMA ? __builtin_fmaf(a, b, c) : a * b + c; }

INLINE float load1(const char *p, long i, int format) {
  return format == KV_BF16 ? widen(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

INLINE vec load(const char *p, long i, int format) {
  return format == KV_BF16 ? load_bf16((const bf16 *)p + i, LANES) : load_floats((const float *)p + i, LANES);
}
