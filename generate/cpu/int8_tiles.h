// Products of 8-bit weights in AMX's tiles, for many rows; linear_int8.h includes it. A tile multiplies the 64 inputs
// of a group, so each product is stored, scaled and added to float sums in vectors, which takes longer than the product
// itself. So two groups are added at a time, while tiles multiply the next two.
#pragma once

#if HAS_INT8_TILES
enum { HIGH = 16, PAIR = 2, AHEAD = 2 };  // rows of a tile, groups added at a time, buffers of products

// Products of two groups: two tiles of rows times two of outputs.
typedef int32_t Products[PAIR][2][2][HIGH][LANES];

// Tiles 0-3 hold sums, 4 and 5 rows of inputs, 6 and 7 weights.
static void configure_int8_tiles(void) {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH, HIGH}};
  __asm__ volatile("" : : "r"(&config) : "memory");  // the intrinsic declares that it reads only the first bytes
  _tile_loadconfig(&config);
}

// Adds half of the rows of `height` tiles, of `count` groups from g on, to 32 outputs of sums.
INLINE void add_products(const Inputs *in, const Products *from, int64_t row, int64_t g, int count, int height, int part,
                         float *sums) {
  const int rows = height * HIGH / 2;
  UNROLL for (int i = 0; i < rows; i++) {
    const int r = part * rows + i;
    const float *scale = in->scales + (row + r) * in->groups + g;
    float *to = sums + r * PANEL;
    vec left = load_floats(to, LANES), right = load_floats(to + LANES, LANES);
    UNROLL for (int c = 0; c < count; c++) {
      vec s = all_of(scale[c]);
      left = fused(__builtin_convertvector(load_ints((*from)[c][r / HIGH][0][r % HIGH]), vec), s, left);
      right = fused(__builtin_convertvector(load_ints((*from)[c][r / HIGH][1][r % HIGH]), vec), s, right);
    }
    store_floats(to, left, LANES);
    store_floats(to + LANES, right, LANES);
  }
}

// Multiplies `height` tiles of rows by 32 outputs of a group.
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

// `height` tiles of rows from `row` on times a panel. A step is two groups, or the last one, of half of the outputs.
INLINE void int8_tile_rows(const Task *t, int64_t row, int64_t last, int64_t p, int height, const char *next, int lines) {
  Products products[AHEAD] __attribute__((aligned(64)));
  float sums[2 * HIGH * PANEL] __attribute__((aligned(64)));
  const Inputs *in = &t->in;
  const int8_t *x = in->bytes + row * in->stride;
  const char *w = (const char *)t->w->packed + p * int8_panel_bytes(t->k);
  const int64_t groups = in->groups, steps = (groups + 1) / 2 * 2;
  memset(sums, 0, (size_t)height * HIGH * PANEL * sizeof *sums);
  for (int64_t step = 0; step <= steps; step++) {
    const int64_t g = step / 2 * 2, before = (step - 1) / 2 * 2;
    const char *from = w + g * PANEL * INT8_GROUP + step % 2 * 128;
    const int adds = step > 0, last_alone = before + 1 == groups;
    const Products *done = &products[(step + 1) % 2];
    float *to = sums + (step + 1) % 2 * 2 * LANES;
    for (int c = 0; c < PAIR; c++) {
      const int multiplies = step < steps && g + c < groups;
      if (multiplies) start_tiles(x + (g + c) * INT8_GROUP, in->stride, from + c * PANEL * INT8_GROUP, height);
      next = fetch(next, lines);
      if (adds && last_alone) add_products(in, done, row, before, 1, height, c, to);
      else if (adds) add_products(in, done, row, before, PAIR, height, c, to);
      if (multiplies) store_tiles(products[step % 2][c], height);
    }
  }
  const float *scales = (const float *)(w + groups * PANEL * INT8_GROUP);
  for (int64_t r = row; r < last; r++) {
    float *sum = sums + (r - row) * PANEL;
    for (int j = 0; j < PANEL; j += LANES)
      store_floats(sum + j, load_floats(sum + j, LANES) * load_floats(scales + j, LANES), LANES);
    put_panel(t, r, p, sum);
  }
}

// As int8_vectors. Tiles may take rows behind the last one, which are allocated and never written out.
static void int8_tiles(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  const int64_t blocks = (last - first + 2 * HIGH - 1) / (2 * HIGH), fetches = 2 * ((t->in.groups + 1) / 2 * 2 + 1);
  const int lines = (int)((bytes / 64 + blocks * fetches - 1) / (blocks * fetches));
  for (int64_t row = first; row < last; row += 2 * HIGH, next += fetches * lines * 64) {
    if (last - row > HIGH) int8_tile_rows(t, row, row + 2 * HIGH < last ? row + 2 * HIGH : last, p, 2, next, lines);
    else int8_tile_rows(t, row, last, p, 1, next, lines);
  }
}
#else
static void configure_int8_tiles(void) {}
static void int8_tiles(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {}
#endif
