// Products of GGUF's blocks in AMX's tiles, for many rows. Groups of a panel are unpacked to signed bytes in the
// first-level cache, where all rows meet them.
#pragma once
#include "blocks_format.h"

#if HAS_INT8_TILES
enum { AT_ONCE = 8, STRIPE = 64 };  // groups unpacked at once, rows that meet them

// A tile of 8 rows, 4 inputs of 16 outputs each, multiplies the 32 inputs of a group.
typedef struct {
  int8_t bytes[AT_ONCE][8][PANEL][4];
  float scales[AT_ONCE][PANEL], least[AT_ONCE][PANEL];
} Unpacked;

INLINE void unpack_groups(int format, const char *w, int64_t groups, Unpacked *to) {
  typedef int8_t cvec __attribute__((vector_size(64)));
  for (int64_t g = 0; g < groups; g++) {
    for (int j = 0; j < PANEL; j += LANES) store_floats(to->scales[g] + j, load_halves(w + 2 * j), LANES);
    w += 2 * PANEL;
    if (format == Q4_1) {
      for (int j = 0; j < PANEL; j += LANES) store_floats(to->least[g] + j, load_halves(w + 2 * j), LANES);
      w += 2 * PANEL;
    }
    for (int s = 0; s < weight_bits(format); s++)
      for (int j = 0; j < PANEL; j += LANES, w += 64) {
        ivec both = load_ints(w);
        if (format == Q8_0) {
          both ^= (int)0x80808080;
          memcpy(to->bytes[g][s][j], &both, 64);
          continue;
        }
        cvec low = (cvec)(both & 0x0f0f0f0f), high = (cvec)(both >> 4 & 0x0f0f0f0f);
        if (format == Q4_0) low -= 8, high -= 8;
        memcpy(to->bytes[g][s][j], &low, 64);
        memcpy(to->bytes[g][4 + s][j], &high, 64);
      }
  }
}

// Tiles 0 and 1 hold sums, 2 and 3 rows of inputs, 4 and 5 weights.
static void configure_blocks_tiles(void) {
  const Tile inputs = {TILE_ROWS, BLOCK}, weights = {8, TILE_BYTES};
  configure_tiles((const Tile[8]){WHOLE, WHOLE, inputs, inputs, weights, weights});
}

#define MULTIPLY_TILE(sums, inputs, weights, g)                  \
  do {                                                           \
    _tile_zero(sums);                                            \
    _tile_loadd(inputs, x + (g) * BLOCK, in->stride);            \
    _tile_loadd(weights, w->bytes[g][0][at], 4 * PANEL);         \
    _tile_dpbssd(sums, inputs, weights);                         \
    _tile_stored(sums, products[sums], sizeof products[0][0]);   \
  } while (0)

// 16 rows from `row` on times 16 outputs from `at` on, `count` groups from `from` on, added to sums [16][64]. While a
// group is scaled, the next one is multiplied.
INLINE void tile_groups(int format, const Inputs *in, const Unpacked *w, int64_t row, int64_t from, int64_t count, int at,
                        float *sums) {
  int32_t products[2][TILE_ROWS][LANES] __attribute__((aligned(64)));
  const int8_t *x = in->bytes + row * in->stride + from * BLOCK;
  const float *scales = in->scales + row * in->groups + from;
  const int32_t *starts = in->starts + row * in->groups + from;
  vec sum[TILE_ROWS];
  UNROLL for (int r = 0; r < TILE_ROWS; r++) sum[r] = load_floats(sums + r * PANEL + at, LANES);
  MULTIPLY_TILE(0, 2, 4, 0);
  for (int64_t g = 0; g < count; g++) {
    if (g + 1 < count && g % 2) MULTIPLY_TILE(0, 2, 4, g + 1);
    if (g + 1 < count && g % 2 == 0) MULTIPLY_TILE(1, 3, 5, g + 1);
    vec scale = load_floats(w->scales[g] + at, LANES), least = load_floats(w->least[g] + at, LANES);
    UNROLL for (int r = 0; r < TILE_ROWS; r++) {
      vec product = __builtin_convertvector(load_ints(products[g % 2][r]), vec);
      vec of_inputs = all_of(scales[r * in->groups + g]);
      sum[r] = fused(product, of_inputs * scale, sum[r]);
      if (format == Q4_1) sum[r] = fused(all_of(total_at(starts + r * in->groups + g)), least, sum[r]);
    }
  }
  UNROLL for (int r = 0; r < TILE_ROWS; r++) store_floats(sums + r * PANEL + at, sum[r], LANES);
}

// As blocks_vectors. Tiles may take rows behind the last one, which are allocated and never written out.
INLINE void blocks_tiles(int format, const Task *t, int64_t p, int64_t first, int64_t last, const char *next,
                         int64_t bytes) {
  Unpacked w __attribute__((aligned(64)));
  float sums[STRIPE * PANEL] __attribute__((aligned(64)));
  const char *packed = (const char *)t->w->packed + p * blocks_panel_bytes(format, t->k), *end = next + bytes;
  const int64_t groups = t->in.groups, chunks = (groups + AT_ONCE - 1) / AT_ONCE;
  const int64_t steps = (last - first + TILE_ROWS - 1) / TILE_ROWS * 4 * chunks;
  const int lines = (int)((bytes / 64 + steps - 1) / steps);
  for (int64_t row = first; row < last; row += STRIPE) {
    const int64_t stop = row + STRIPE < last ? row + STRIPE : last;
    memset(sums, 0, sizeof sums);
    for (int64_t g = 0; g < groups; g += AT_ONCE) {
      int64_t count = groups - g < AT_ONCE ? groups - g : AT_ONCE;
      unpack_groups(format, packed + g * group_bytes(format), count, &w);
      for (int64_t r = row; r < stop; r += TILE_ROWS)
        for (int at = 0; at < PANEL; at += LANES) {
          if (next < end) next = fetch(next, lines);
          tile_groups(format, &t->in, &w, r, g, count, at, sums + (r - row) * PANEL);
        }
    }
    put_rows(t, row, stop - row, p, sums);
  }
}
#else
static void configure_blocks_tiles(void) {}
static void blocks_tiles(int format, const Task *t, int64_t p, int64_t first, int64_t last, const char *next,
                         int64_t bytes) {}
#endif
