// A panel of 8-bit weights, and its products in AMX's tiles, for many rows. A tile multiplies the 64 inputs of a group,
// so each product is stored, scaled and added to float sums in vectors, which takes longer than the product itself. So
// vectors add some products while tiles multiply the next.
#pragma once
#include "quantized.h"

// A panel is [K/4][64][4], so that four inputs meet 64 outputs in a few registers, 64 inputs in four tiles; 64 scales
// follow. Inputs that fill the last group have weights of zero.
enum { INT8_GROUP = 64, GROUP_BYTES = PANEL * INT8_GROUP };

static int64_t int8_panel_bytes(int64_t k) { return PANEL * (padded(k, INT8_GROUP) + (int64_t)sizeof(float)); }

#if HAS_INT8_TILES
enum { HIGH = TILE_ROWS, MOST_ROWS = 4 * HIGH };  // rows of a tile, rows whose sums stay in the first-level cache
enum { AHEAD = 2 };  // groups that are fetched ahead

// Products of a group: two tiles of rows times two of outputs.
typedef int32_t Products[2][2][HIGH][LANES];

// Two tiles of rows, or the last one, times 32 outputs of a group.
typedef struct {
  int64_t row, g;
  int height, at;
} Step;

// Steps go through the outputs first, then the rows, then the groups, so that weights and rows stay in the first-level
// cache.
INLINE Step step_at(int64_t number, int64_t rows) {
  const int64_t blocks = (rows + 2 * HIGH - 1) / (2 * HIGH), row = number / 2 % blocks * 2 * HIGH;
  return (Step){row, number / 2 / blocks, row + HIGH < rows ? 2 : 1, number % 2 * 32};
}

// Adds a tile of rows of a step's products to the sums of its outputs.
INLINE void add_tile(const int32_t (*from)[HIGH][LANES], const float *scales, int64_t groups, float *sums) {
  UNROLL for (int r = 0; r < HIGH; r++) {
    float *to = sums + r * PANEL;
    vec scale = all_of(scales[r * groups]);
    UNROLL for (int j = 0; j < 2; j++) {
      vec sum = load_floats(to + j * LANES, LANES);
      store_floats(to + j * LANES, fused(__builtin_convertvector(load_ints(from[j][r]), vec), scale, sum), LANES);
    }
  }
}

// Multiplies `height` tiles of rows by 32 outputs of a group. Tiles 0-3 hold sums, 4 and 5 rows of inputs, 6 and 7
// weights.
INLINE void start_tiles(const int8_t *x, int64_t stride, const char *w, int height) {
  _tile_loadd(4, x, stride);
  _tile_loadd(6, w, 4 * PANEL);
  _tile_zero(0);
  _tile_dpbssd(0, 4, 6);
  _tile_loadd(7, w + 64, 4 * PANEL);
  _tile_zero(1);
  _tile_dpbssd(1, 4, 7);
  if (height == 1) return;
  _tile_loadd(5, x + HIGH * stride, stride);
  _tile_zero(2);
  _tile_dpbssd(2, 5, 6);
  _tile_zero(3);
  _tile_dpbssd(3, 5, 7);
}

INLINE void store_tiles(int32_t (*to)[2][HIGH][LANES], int height) {
  _tile_stored(0, to[0][0], sizeof to[0][0][0]);
  _tile_stored(1, to[0][1], sizeof to[0][0][0]);
  if (height == 1) return;
  _tile_stored(2, to[1][0], sizeof to[0][0][0]);
  _tile_stored(3, to[1][1], sizeof to[0][0][0]);
}

// Rows from `first` on times a panel, into sums [rows][64]: the vectors add one step's products while the tiles
// multiply the next step's. Meanwhile the groups behind those at work are fetched, at last `after`.
static void int8_tile_sums(const Task *t, int64_t first, int64_t rows, const char *w, const char *after, int lines,
                           float *sums) {
  Products products[2] __attribute__((aligned(64)));
  const Inputs *in = &t->in;
  const int64_t groups = in->groups, blocks = (rows + 2 * HIGH - 1) / (2 * HIGH), steps = groups * blocks * 2;
  const char *next = w;
  Step before = {0};
  for (int64_t number = 0; number <= steps; number++) {
    const Step now = step_at(number, rows);
    if (number < steps) {
      start_tiles(in->bytes + (first + now.row) * in->stride + now.g * INT8_GROUP, in->stride,
                  w + now.g * GROUP_BYTES + 4 * now.at, now.height);
      const int64_t ahead = now.g + AHEAD;
      if (number % (2 * blocks) == 0) next = (ahead < groups ? w : after - groups * GROUP_BYTES) + ahead * GROUP_BYTES;
      next = fetch(next, lines);
    }
    if (number) {
      const float *scales = in->scales + (first + before.row) * groups + before.g;
      float *to = sums + before.row * PANEL + before.at;
      add_tile(products[(number + 1) % 2][0], scales, groups, to);
      if (before.height == 2)
        add_tile(products[(number + 1) % 2][1], scales + HIGH * groups, groups, to + HIGH * PANEL);
    }
    if (number < steps) store_tiles(products[number % 2], now.height);
    before = now;
  }
}

// As int8_vectors. Tiles may take rows behind the last one, which are allocated and never written out.
static void int8_tiles(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  float sums[MOST_ROWS * PANEL] __attribute__((aligned(64)));
  const char *w = (const char *)t->w->packed + p * int8_panel_bytes(t->k);
  const float *scales = (const float *)(w + t->in.groups * GROUP_BYTES);
  for (int64_t row = first; row < last; row += MOST_ROWS) {
    const int64_t rows = last - row < MOST_ROWS ? last - row : MOST_ROWS, blocks = (rows + 2 * HIGH - 1) / (2 * HIGH);
    memset(sums, 0, (size_t)padded(rows, HIGH) * PANEL * sizeof *sums);
    int8_tile_sums(t, row, rows, w, bytes ? next : w, row > first ? 0 : (int)(32 / blocks), sums);
    for (int64_t r = 0; r < rows; r++)
      for (int j = 0; j < PANEL; j += LANES) {
        float *sum = sums + r * PANEL + j;
        store_floats(sum, load_floats(sum, LANES) * load_floats(scales + j, LANES), LANES);
      }
    put_rows(t, row, rows, p, sums);
  }
}
#else
static void int8_tiles(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {}
#endif
