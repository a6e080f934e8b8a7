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
#include "tiles.h"

#if LANES == 16
enum { FMA_ROWS = 12, FMA_SUMS = 24 };  // rows of a block, and registers for its sums
#elif LANES == 8
enum { FMA_ROWS = 6, FMA_SUMS = 12 };
#else
enum { FMA_ROWS = 6, FMA_SUMS = 24 };
#endif
// AVX2 widens weights as it multiplies, on ports that its products leave free; others share the work among all rows.
enum { WIDENS_FIRST = LANES != 8 };
enum { CHUNK = WIDENS_FIRST ? 32 : 64, STRIPE_ROWS = 6 * FMA_ROWS };  // inputs and rows that are multiplied at once

enum { PAIR = 4 * PANEL };  // bytes of a panel's pairs of inputs

static int way = FMA;

int packed_linear_has(int wanted) {
  if (wanted == FMA) return HAS_FMA;
#ifdef __AVX512BF16__
  if (wanted == DOT) return 1;
#endif
  return wanted == TILES && may_use_tiles();
}

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

// What a worker has in its first-level cache: CHUNK inputs of the panel's weights and of a stripe of rows, widened to
// float32, and the sums of these rows so far.
typedef struct {
  const char *pairs;  // of the weights, as they are packed
  float w[WIDENS_FIRST ? CHUNK : 1][PANEL], x[STRIPE_ROWS][CHUNK], sums[STRIPE_ROWS][PANEL];
} Widened;

// LANES pairs of weights to their first or second inputs.
INLINE vec widened(const char *pairs, int second) {
  uvec pair;
  memcpy(&pair, pairs, sizeof pair);
  return (vec)(second ? pair & 0xffff0000 : pair << 16);
}

INLINE void widen_weights(Widened *t, int64_t count) {
  const char *w = t->pairs;
  for (int64_t i = 0; i < count; i += 2)
    UNROLL for (int j = 0; j < PANEL; j += LANES, w += sizeof(vec)) {
      store_floats(&t->w[i][j], widened(w, 0), LANES);
      store_floats(&t->w[i + 1][j], widened(w, 1), LANES);
    }
}

// Vectors of outputs at once: more for few rows, so that sums fill the registers.
INLINE int fma_vectors_of(int64_t rows) {
  const int all = PANEL / LANES;
  if (rows > FMA_ROWS) rows = FMA_ROWS;
  return rows * all <= FMA_SUMS ? all : rows * all <= 2 * FMA_SUMS ? all / 2 : all / 4;
}

// R rows from `row` on times `count` inputs of a panel. An output's products are added in the same order for any number
// of rows.
INLINE void fma_block(Widened *t, int64_t row, int64_t count, int R, Ahead ahead) {
  const int V = fma_vectors_of(R);
  const float(*x)[CHUNK] = t->x + row;
  float(*sums)[PANEL] = t->sums + row;
  for (int at = 0; at < PANEL; at += V * LANES) {
    const char *pairs = t->pairs + 4 * at;
    vec acc[FMA_ROWS][PANEL / LANES];
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int j = 0; j < V; j++) acc[r][j] = load_floats(&sums[r][at + j * LANES], LANES);
    for (int64_t i = 0; i < count; i += 2, pairs += PAIR) {
      fetch_step(&ahead);
      UNROLL for (int second = 0; second < 2; second++) {
        vec w[PANEL / LANES];
        UNROLL for (int j = 0; j < V; j++)
          w[j] = WIDENS_FIRST ? load_floats(&t->w[i + second][at + j * LANES], LANES)
                              : widened(pairs + 4 * j * LANES, second);
        UNROLL for (int r = 0; r < R; r++) {
          vec one = all_of(x[r][i + second]);
          UNROLL for (int j = 0; j < V; j++) acc[r][j] = fused(one, w[j], acc[r][j]);
        }
      }
    }
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int j = 0; j < V; j++) store_floats(&sums[r][at + j * LANES], acc[r][j], LANES);
  }
}

APART void fma_rows(Widened *t, int64_t row, int64_t rows, int64_t count, Ahead ahead) {
  switch (rows) {
    case 1: fma_block(t, row, count, 1, ahead); break;
    case 2: fma_block(t, row, count, 2, ahead); break;
    case 3: fma_block(t, row, count, 3, ahead); break;
    case 4: fma_block(t, row, count, 4, ahead); break;
    case 5: fma_block(t, row, count, 5, ahead); break;
#if LANES == 16
    case 6: fma_block(t, row, count, 6, ahead); break;
    case 7: fma_block(t, row, count, 7, ahead); break;
    case 8: fma_block(t, row, count, 8, ahead); break;
    case 9: fma_block(t, row, count, 9, ahead); break;
    case 10: fma_block(t, row, count, 10, ahead); break;
    case 11: fma_block(t, row, count, 11, ahead); break;
#endif
    default: fma_block(t, row, count, FMA_ROWS, ahead);
  }
}

// Rows first up to last times panel p; meanwhile what lies SLICE_BYTES further on is fetched, at last `bytes` from `next`.
static void fma_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  const int64_t whole = bfloat16_panel_bytes(t->k);
  const char *panel = (const char *)t->w->packed + p * whole;
  Widened wide __attribute__((aligned(64)));
  for (int64_t stripe = first; stripe < last; stripe += STRIPE_ROWS) {
    const int64_t rows = last - stripe < STRIPE_ROWS ? last - stripe : STRIPE_ROWS;
    const int64_t blocks = (rows + FMA_ROWS - 1) / FMA_ROWS;
    memset(wide.sums, 0, (size_t)rows * sizeof wide.sums[0]);
    for (int64_t from = 0; from < t->k; from += CHUNK) {
      const int64_t count = t->k - from < CHUNK ? t->k - from : CHUNK;
      const int64_t over = from * PAIR / 2 + SLICE_BYTES - whole, left = over < 0 ? -over : bytes - over;
      const int64_t fetched = left < 0 ? 0 : left < count * PAIR / 2 ? left : count * PAIR / 2;
      wide.pairs = panel + from * PAIR / 2;
      if (WIDENS_FIRST) widen_weights(&wide, count);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < count; i += LANES)
          store_floats(wide.x[r] + i, load_bf16(t->x + (stripe + r) * t->k + from + i, count - i), LANES);
      for (int64_t b = 0; b < blocks; b++) {
        const int64_t row = b * FMA_ROWS, steps = count / 2 * (PANEL / LANES / fma_vectors_of(rows - row));
        const char *then = over < 0 ? panel + whole + over : next + over;
        fma_rows(&wide, row, rows - row, count, share_of(then, fetched, b, blocks, steps));
      }
    }
    put_rows(t, stripe, rows, p, wide.sums[0]);
  }
}

#ifdef __AVX512BF16__
#include "linear_dot.h"

#if HAS_TILES
enum { TILE_VALUES = TILE_ROWS * 32, STEP_BYTES = 64 * PANEL };  // of a tile of x; of a panel's 32 inputs
enum { STRIPE_TILES = 4, AT_ONCE_STEPS = 4 };

// Tiles of one row for each row that there is, up to 16: 0-3 hold sums, 4 rows of x, 5-7 weights, 16 pairs of inputs by
// 16 outputs.
static void configure_for(int64_t m) {
  const Tile some = {(uint8_t)m, TILE_BYTES};
  configure_tiles((const Tile[8]){some, some, some, some, some, WHOLE, WHOLE, WHOLE});
}

// A tile of rows meets 32 inputs of weights at each step.
typedef struct {
  const bf16 *x;
  int64_t stride, step;  // elements between its rows, and between steps
} Rows;

// Steps from `from` on of a panel's weights; meanwhile `lines` from `next` on are fetched with each product: a row of
// fetches would hold up the tiles.
typedef struct {
  const char *w, *next;
  int64_t from, count;
  int lines;
} Steps;

static void begin_sums(float *sums, float *below, int64_t from) {
  if (from) {
    _tile_loadd(0, sums, 4 * PANEL);
    _tile_loadd(1, sums + 16, 4 * PANEL);
    _tile_loadd(2, below, 4 * PANEL);
    _tile_loadd(3, below + 16, 4 * PANEL);
    return;
  }
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

static void store_sums(float *sums, float *below) {
  _tile_stored(0, sums, 4 * PANEL);
  _tile_stored(1, sums + 16, 4 * PANEL);
  _tile_stored(2, below, 4 * PANEL);
  _tile_stored(3, below + 16, 4 * PANEL);
}

// A tile of rows times 64 outputs, added to sums.
static void tile_block(Rows a, Steps s, float *sums) {
  const char *w = s.w + s.from * STEP_BYTES;
  const bf16 *x = a.x + s.from * a.step;
  begin_sums(sums, sums + 32, s.from);
  for (int64_t i = 0; i < s.count; i++, w += STEP_BYTES, x += a.step) {
    _tile_loadd(4, x, 2 * a.stride);
    _tile_loadd(5, w, 256);
    _tile_dpbf16ps(0, 4, 5);
    s.next = fetch(s.next, s.lines);
    _tile_loadd(6, w + 64, 256);
    _tile_dpbf16ps(1, 4, 6);
    s.next = fetch(s.next, s.lines);
    _tile_loadd(7, w + 128, 256);
    _tile_dpbf16ps(2, 4, 7);
    s.next = fetch(s.next, s.lines);
    _tile_loadd(5, w + 192, 256);
    _tile_dpbf16ps(3, 4, 5);
    s.next = fetch(s.next, s.lines);
  }
  store_sums(sums, sums + 32);
}

// Two tiles of rows times 32 outputs, so that every tile that is loaded is used twice.
static void tile_square(Rows a, Steps s, int at, float *sums) {
  const char *w = s.w + s.from * STEP_BYTES + 4 * at;
  const bf16 *x = a.x + s.from * a.step;
  float *below = sums + TILE_ROWS * PANEL;
  begin_sums(sums, below, s.from);
  for (int64_t i = 0; i < s.count; i++, w += STEP_BYTES, x += a.step) {
    _tile_loadd(6, w, 256);
    _tile_loadd(4, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    s.next = fetch(s.next, s.lines);
    _tile_loadd(5, x + TILE_VALUES, 64);
    _tile_dpbf16ps(2, 5, 6);
    s.next = fetch(s.next, s.lines);
    _tile_loadd(7, w + 64, 256);
    _tile_dpbf16ps(1, 4, 7);
    s.next = fetch(s.next, s.lines);
    _tile_dpbf16ps(3, 5, 7);
    s.next = fetch(s.next, s.lines);
  }
  store_sums(sums, below);
}

// A few steps of up to four tiles of rows at a time, while rows and weights lie in the first-level cache: from the
// second-level cache, every tile would come as often as it is used, which takes longer than the products. What is
// fetched meanwhile are the next few steps, and at the end `after`; fetched earlier, lines would take more of the few
// buffers that all loads share.
static void tile_stripe(Rows x, int64_t tiles, Steps s, int64_t steps, const char *after, float *sums) {
  for (; s.from < steps; s.from += AT_ONCE_STEPS) {
    s.count = steps - s.from < AT_ONCE_STEPS ? steps - s.from : AT_ONCE_STEPS;
    s.next = s.from + s.count < steps ? s.w + (s.from + s.count) * STEP_BYTES : after;
    for (int64_t i = 0; i < tiles; i += 2) {
      const Rows rows = {x.x + i * TILE_VALUES, x.stride, x.step};
      float *to = sums + i * TILE_ROWS * PANEL;
      if (i + 1 == tiles) tile_block(rows, s, to);
      for (int at = 0; i + 1 < tiles && at < PANEL; at += 32) {
        tile_square(rows, s, at, to + at);
        s.next += 4 * s.lines * s.count * 64;
      }
    }
  }
}

// As dot_panel.
static void tile_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  float sums[STRIPE_TILES * TILE_ROWS * PANEL] __attribute__((aligned(64)));
  const int64_t all = (t->m + TILE_ROWS - 1) / TILE_ROWS, steps = t->k / 32;
  const char *w = (const char *)t->w->packed + p * bfloat16_panel_bytes(t->k);
  if (all == 1) {  // the processor fetches the rest of a panel by itself once it has begun
    tile_block((Rows){t->x, t->k, 32}, (Steps){w, next, 0, steps, bytes ? 4 : 0}, sums);
    put_rows(t, 0, t->m, p, sums);
    return;
  }
  for (int64_t row = first; row < last; row += STRIPE_TILES * TILE_ROWS) {
    const int64_t rows = last - row < STRIPE_TILES * TILE_ROWS ? last - row : STRIPE_TILES * TILE_ROWS;
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int lines = row > first ? 0 : (int)((16 + tiles - 1) / tiles);  // later rows find the panel in the cache
    const Rows x = {t->tiled + row / TILE_ROWS * TILE_VALUES, 32, all * TILE_VALUES};
    tile_stripe(x, tiles, (Steps){w, next, 0, 0, lines}, steps, bytes ? next : w, sums);
    put_rows(t, row, rows, p, sums);
  }
}

// x in tiles: [k/32][rows/16][16][32], zeros behind the last row.
static void tile_some(void *job, int64_t first, int64_t last, int worker) {
  const Task *t = job;
  const int64_t tiles = (t->m + TILE_ROWS - 1) / TILE_ROWS;
  for (int64_t row = first; row < last; row++) {
    bf16 *to = t->tiled + row / TILE_ROWS * TILE_VALUES + row % TILE_ROWS * 32;
    for (int64_t i = 0; i < t->k; i += 32, to += tiles * TILE_VALUES)
      if (row < t->m) memcpy(to, t->x + row * t->k + i, 64);
      else memset(to, 0, 64);
  }
}
#endif
#endif

static int takes_tiles(const Task *t) { return HAS_TILES && way == TILES && t->k % 32 == 0; }

// Lays out x for the way that is taken. Returns 0 where there is no memory.
static int bfloat16_prepare(Task *t) {
#if HAS_TILES
  const int64_t rows = padded(t->m, TILE_ROWS);
  if (!takes_tiles(t) || t->m <= TILE_ROWS) return 1;
  t->tiled = scratch(rows * t->k * (int64_t)sizeof(bf16));
  if (t->tiled) share_out(tile_some, t, rows, TILE_ROWS / 2);
  return t->tiled != 0;
#else
  return 1;
#endif
}

static void bfloat16_begin(const Task *t) {
#if HAS_TILES
  if (takes_tiles(t) && t->m <= TILE_ROWS) configure_for(t->m);
  else if (takes_tiles(t)) configure_whole_tiles();
#endif
}

static void bfloat16_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
#if HAS_TILES
  if (takes_tiles(t)) return tile_panel(t, p, first, last, next, bytes);
#endif
#ifdef __AVX512BF16__
  if (way != FMA) return dot_panel(t, p, first, last, next, bytes);
#endif
  fma_panel(t, p, first, last, next, bytes);
}

static void bfloat16_end(const Task *t) {
  if (takes_tiles(t)) release_tiles();
}
