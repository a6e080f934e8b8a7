// Linear layers with weights in GGUF's blocks of 32 inputs: Q4_0, Q4_1 and Q8_0, which have a float16 scale and, for
// Q4_1, a minimum. Inputs are rounded to bytes with a scale for the same 32, as llama.cpp does.
//
// An output is the sum over its groups of 32, in their order, of (sum of products) * (scale * scale). The sum of
// products is exact in int32, and what follows is one fused operation after the other. So vectors and tiles give the
// same bits for every number of rows, and few rows may take vectors where many take tiles.
#pragma once
#include "blocks_format.h"
#include "blocks_tiles.h"

// ---- packing ----

// weight: rows of blocks, as in a file; those behind k are zeros. Outputs that fill the last panel have scales of zero.
INLINE void blocks_pack_panel(int format, const void *weight, char *packed, int64_t p, int64_t n, int64_t k, int gated) {
  const int64_t size = block_bytes(format), groups = padded(k, BLOCK) / BLOCK;
  const int halves = format == Q4_1 ? 2 : 1, steps = weight_bits(format);
  const uint8_t flip = format == Q8_0 ? BYTE_OFFSET : 0;  // as good as adding it
  memset(packed, 0, (size_t)(groups * group_bytes(format)));
  for (int64_t j = 0; j < PANEL; j++) {
    int64_t row = packed_row(p * PANEL + j, n, gated);
    if (row >= n) continue;
    for (int64_t g = 0; g < groups; g++) {
      const uint8_t *from = (const uint8_t *)weight + (row * groups + g) * size;
      uint8_t *to = (uint8_t *)packed + g * group_bytes(format);
      for (int h = 0; h < halves; h++, from += 2, to += 2 * PANEL) memcpy(to + 2 * j, from, 2);
      for (int s = 0; s < steps; s++)
        for (int b = 0; b < 4; b++) to[(s * PANEL + j) * 4 + b] = from[4 * s + b] ^ flip;
    }
  }
}

// ---- products in vectors ----

// As many rows at once as leave registers for the weights: with two vectors of outputs, and with four.
#if LANES == 16
enum { BLOCK_ROWS = 6, FEW_ROWS_OF_BLOCKS = 2 };
#elif defined(__aarch64__)
enum { BLOCK_ROWS = 4, FEW_ROWS_OF_BLOCKS = 2 };
#elif PAIRS_OF_BYTES
enum { BLOCK_ROWS = 4, FEW_ROWS_OF_BLOCKS = 1 };
#else
enum { BLOCK_ROWS = 2, FEW_ROWS_OF_BLOCKS = 1 };
#endif

// A step's products of V vectors of weights with 4 inputs of R rows from x on.
INLINE void blocks_step(int format, ivec (*acc)[4], const ivec *weights, const int8_t *x, int64_t stride, int R,
                        int V) {
  UNROLL for (int r = 0; r < R; r++) {
    ivec four = four_bytes(x + r * stride);
    UNROLL for (int j = 0; j < V; j++)
      acc[r][j] = format == Q8_0 ? dot(acc[r][j], weights[j], four) : dot_small(acc[r][j], weights[j], four);
  }
}

// AVX2's 16 registers hold low or high halves beside the sums, so all low ones come first, and float sums stay in
// memory. Else GCC would keep sums of products there, and wait for each.
#define FEW_REGISTERS() if (PAIRS_OF_BYTES && format != Q8_0 && R * V >= 8) __asm__ volatile("" : "+m"(sum))

// R rows from `row` on times V vectors of outputs of panel p, from output `at` on, into sums [R][64]. `lines` of `next`
// are fetched with each group.
INLINE const char *blocks_part(int format, const Task *t, int64_t row, int64_t p, int at, int R, int V, float *sums,
                               const char *next, int lines) {
  const Inputs *in = &t->in;
  const int8_t *x = in->bytes + row * in->stride;
  const float *scales = in->scales + row * in->groups;
  const int32_t *starts = in->starts + row * in->groups;
  const char *w = (const char *)t->w->packed + p * blocks_panel_bytes(format, t->k) + 2 * at;
  vec sum[BLOCK_ROWS][4];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < V; j++) sum[r][j] = (vec){0};
  for (int64_t g = 0; g < in->groups; g++, x += BLOCK, scales++, starts++) {
    const char *halves = w;
    ivec acc[BLOCK_ROWS][4];
    w += format == Q4_1 ? 4 * PANEL : 2 * PANEL;
    next = fetch(next, lines);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int j = 0; j < V; j++) acc[r][j] = (ivec){0};
    const int turns = PAIRS_OF_BYTES && format != Q8_0 ? 2 : 1;
    UNROLL for (int turn = 0; turn < turns; turn++)
      UNROLL for (int s = 0; s < weight_bits(format); s++) {
        const char *step = w + 4 * PANEL * s + 2 * at;  // an output has 2 bytes where w began, 4 here
        ivec low[4], high[4];
        FEW_REGISTERS();
        UNROLL for (int j = 0; j < V; j++) {
          ivec both = load_ints(step + 4 * LANES * j);
          low[j] = format == Q8_0 ? both : both & 0x0f0f0f0f;
          high[j] = both >> 4 & 0x0f0f0f0f;
        }
        if (turn == 0) blocks_step(format, acc, low, x + 4 * s, in->stride, R, V);
        if (turn == turns - 1 && format != Q8_0)
          blocks_step(format, acc, high, x + BLOCK / 2 + 4 * s, in->stride, R, V);
      }
    w += 4 * PANEL * weight_bits(format);
    FEW_REGISTERS();
    vec scale[4], least[4];
    UNROLL for (int j = 0; j < V; j++) scale[j] = load_halves(halves + 2 * LANES * j);
    if (format == Q4_1)
      UNROLL for (int j = 0; j < V; j++) least[j] = load_halves(halves + 2 * PANEL + 2 * LANES * j);
    UNROLL for (int r = 0; r < R; r++) {
      ivec start = all_of_int(format == Q4_1 ? 0 : starts[r * in->groups]);
      UNROLL for (int j = 0; j < V; j++) acc[r][j] = (format == Q8_0 ? acc[r][j] : whole_sum(acc[r][j])) + start;
      vec of_inputs = all_of(scales[r * in->groups]), total = all_of(total_at(starts + r * in->groups));
      UNROLL for (int j = 0; j < V; j++) {
        sum[r][j] = fused(__builtin_convertvector(acc[r][j], vec), of_inputs * scale[j], sum[r][j]);
        if (format == Q4_1) sum[r][j] = fused(total, least[j], sum[r][j]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int j = 0; j < V; j++) store_floats(sums + r * PANEL + at + LANES * j, sum[r][j], LANES);
  return next;
}

INLINE void blocks_rows(int format, const Task *t, int64_t row, int64_t p, int R, const char *next, int lines) {
  float sums[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
  const int V = R <= FEW_ROWS_OF_BLOCKS ? 4 : 2, parts = PANEL / (V * LANES);
  for (int part = 0; part < parts; part++)
    next = blocks_part(format, t, row, p, part * V * LANES, R, V, sums, next, (lines + part) / parts);
  put_rows(t, row, R, p, sums);
}

// Rows first up to last times panel p; meanwhile `bytes` from `next` on are fetched.
INLINE void blocks_vectors(int format, const Task *t, int64_t p, int64_t first, int64_t last, const char *next,
                           int64_t bytes) {
  const int64_t steps = (last - first + BLOCK_ROWS - 1) / BLOCK_ROWS * t->in.groups;
  const int lines = (int)((bytes / 64 + steps - 1) / steps);
  const int64_t stretch = t->in.groups * lines * 64;
  for (int64_t row = first; row < last; row += BLOCK_ROWS, next += stretch, bytes -= stretch) {
    int l = bytes > 0 ? lines : 0;
    switch (last - row) {
      case 1: blocks_rows(format, t, row, p, 1, next, l); break;
#if LANES == 16 || defined(__aarch64__) || PAIRS_OF_BYTES
      case 2: blocks_rows(format, t, row, p, 2, next, l); break;
      case 3: blocks_rows(format, t, row, p, 3, next, l); break;
#endif
#if LANES == 16
      case 4: blocks_rows(format, t, row, p, 4, next, l); break;
      case 5: blocks_rows(format, t, row, p, 5, next, l); break;
#endif
      default: blocks_rows(format, t, row, p, BLOCK_ROWS, next, l);
    }
  }
}

// ---- the formats ----

enum { FEWEST_FOR_TILES = 32 };  // rows; fewer are as fast in vectors

static int blocks_take_tiles(const Task *t) { return HAS_INT8_TILES && way == TILES && t->m >= FEWEST_FOR_TILES; }

static void blocks_begin(const Task *t) {
  if (blocks_take_tiles(t)) configure_blocks_tiles();
}

static void blocks_end(const Task *t) {
  if (blocks_take_tiles(t)) release_tiles();
}

#define BLOCKS_FORMAT(name, format, offset)                                                                           \
  static int64_t name##_panel_bytes(int64_t k) { return blocks_panel_bytes(format, k); }                              \
  static void name##_pack_panel(const void *w, char *packed, int64_t p, int64_t n, int64_t k, int gated) {            \
    blocks_pack_panel(format, w, packed, p, n, k, gated);                                                             \
  }                                                                                                                   \
  static int name##_prepare(Task *t) { return round_inputs(t, BLOCK, offset); }                                       \
  static void name##_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {  \
    if (blocks_take_tiles(t)) blocks_tiles(format, t, p, first, last, next, bytes);                                   \
    else blocks_vectors(format, t, p, first, last, next, bytes);                                                      \
  }
BLOCKS_FORMAT(q4_0, Q4_0, 8)
BLOCKS_FORMAT(q4_1, Q4_1, MINUS_ONE)
BLOCKS_FORMAT(q8_0, Q8_0, BYTE_OFFSET)
