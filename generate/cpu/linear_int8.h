// Linear layers with weights of 8 bits, a scale for each output, and inputs rounded to 8 bits in groups of 64.
//
// An output is the sum over its groups, in their order, of (int32 sum of products) * (the group's scale), each step
// fused where the processor can, and at last times the output's scale.
//
// A panel is [K/4][64][4], so that four inputs meet 64 outputs in a few registers, 64 inputs in four tiles; 64 scales
// follow. Inputs that fill the last group have weights of zero.
#pragma once
#include "quantized.h"

// What is added to the weights when they are stored. Tiles need no offset, but vectors flip the sign then.
enum { INT8_GROUP = 64, INT8_FLIPS = HAS_INT8_TILES, INT8_STORED = INT8_FLIPS ? 0 : BYTE_OFFSET };

static int64_t int8_panel_bytes(int64_t k) { return PANEL * (padded(k, INT8_GROUP) + (int64_t)sizeof(float)); }

// w [n, k], bfloat16 and finite.
static void int8_pack_panel(const void *weight, char *packed, int64_t p, int64_t n, int64_t k, int gated) {
  const bf16 *w = weight;
  const int64_t whole = padded(k, INT8_GROUP);
  float *scales = (float *)(packed + PANEL * whole);
  memset(packed, (uint8_t)INT8_STORED, (size_t)(PANEL * whole));
  for (int64_t j = 0; j < PANEL; j++) {
    int64_t row = packed_row(p * PANEL + j, n, gated);
    uint32_t most = 0;
    for (int64_t i = 0; row < n && i < k; i++) most = (w[row * k + i] & 0x7fff) > most ? w[row * k + i] & 0x7fff : most;
    float peak, x;
    most <<= 16;
    memcpy(&peak, &most, 4);
    scales[j] = peak / 127.f;
    if (peak < 1e-30f) continue;
    for (int64_t i = 0; i < k; i++) {
      uint32_t bits = (uint32_t)w[row * k + i] << 16;
      memcpy(&x, &bits, 4);
      packed[(i / 4 * PANEL + j) * 4 + i % 4] = (char)(lrintf(x * (127.f / peak)) + INT8_STORED);
    }
  }
}

// Rows at once with 4 vectors of outputs: as many sums as there are registers beside the weights.
#if LANES == 16 || defined(__aarch64__)
enum { INT8_ROWS = 6 };
#elif defined(__AVXVNNI__)
enum { INT8_ROWS = 3 };
#elif PAIRS_OF_BYTES
enum { INT8_ROWS = 4 };
#else
enum { INT8_ROWS = 2 };
#endif

// R rows from `row` on times one panel, V vectors of outputs at a time. Float sums stay in the first-level cache, since
// they are needed once for 64 inputs. `lines` of `next` are fetched with four inputs of all outputs.
INLINE void int8_block(const Task *t, int64_t row, int64_t p, int R, const char *next, int lines) {
  const int V = PAIRS_OF_BYTES && R > 2 ? 2 : 4, parts = PANEL / (V * LANES);
  const Inputs *in = &t->in;
  const char *w = (const char *)t->w->packed + p * int8_panel_bytes(t->k);
  const float *scales = (const float *)(w + PANEL * padded(t->k, INT8_GROUP));
  float sums[INT8_ROWS][PANEL] __attribute__((aligned(64)));
  for (int at = 0; at < PANEL; at += V * LANES) {
    const int8_t *x = in->bytes + row * in->stride;
    const char *from = w + 4 * at;
    UNROLL for (int r = 0; r < R; r++) memset(&sums[r][at], 0, V * LANES * sizeof(float));
    for (int64_t g = 0; g < in->groups; g++) {
      ivec acc[INT8_ROWS][4];
      UNROLL for (int r = 0; r < R; r++) {
        ivec start = all_of_int(in->starts[(row + r) * in->groups + g]);
        UNROLL for (int j = 0; j < V; j++) acc[r][j] = start;
      }
      for (int s = 0; s < INT8_GROUP / 4; s++, x += 4, from += 4 * PANEL) {
        ivec weights[4];
        UNROLL for (int j = 0; j < V; j++) {
          weights[j] = load_ints(from + 4 * LANES * j);
          if (INT8_FLIPS) weights[j] ^= (int32_t)0x80808080;
        }
        next = fetch(next, (lines + at / (V * LANES)) / parts);
        UNROLL for (int r = 0; r < R; r++) {
          ivec four = four_bytes(x + r * in->stride);
          UNROLL for (int j = 0; j < V; j++) acc[r][j] = dot(acc[r][j], weights[j], four);
        }
      }
      UNROLL for (int r = 0; r < R; r++) {
        vec scale = all_of(in->scales[(row + r) * in->groups + g]);
        UNROLL for (int j = 0; j < V; j++) {
          float *sum = &sums[r][at + j * LANES];
          store_floats(sum, fused(__builtin_convertvector(acc[r][j], vec), scale, load_floats(sum, LANES)), LANES);
        }
      }
    }
    UNROLL for (int j = 0; j < V; j++) {
      vec scale = load_floats(scales + at + j * LANES, LANES);
      UNROLL for (int r = 0; r < R; r++) {
        float *sum = &sums[r][at + j * LANES];
        store_floats(sum, load_floats(sum, LANES) * scale, LANES);
      }
    }
  }
  put_rows(t, row, R, p, sums[0]);
}

// Rows first up to last times panel p; meanwhile `bytes` from `next` on are fetched.
static void int8_vectors(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  int64_t blocks = (last - first + INT8_ROWS - 1) / INT8_ROWS;
  int lines = (int)((4 + blocks - 1) / blocks);
  int64_t stretch = t->in.groups * PANEL * INT8_GROUP / 4 * lines;
  for (int64_t row = first; row < last; row += INT8_ROWS, next += stretch, bytes -= stretch) {
    int n = bytes >= stretch ? lines : 0;
    switch (last - row) {
      case 1: int8_block(t, row, p, 1, next, n); break;
#if LANES == 16 || defined(__aarch64__)
      case 2: int8_block(t, row, p, 2, next, n); break;
      case 3: int8_block(t, row, p, 3, next, n); break;
      case 4: int8_block(t, row, p, 4, next, n); break;
      case 5: int8_block(t, row, p, 5, next, n); break;
#elif PAIRS_OF_BYTES
      case 2: int8_block(t, row, p, 2, next, n); break;
      case 3: int8_block(t, row, p, 3, next, n); break;
#elif defined(__AVXVNNI__)
      case 2: int8_block(t, row, p, 2, next, n); break;
#endif
      default: int8_block(t, row, p, INT8_ROWS, next, n);
    }
  }
}

#include "int8_tiles.h"

enum { INT8_FEWEST = 12 };  // rows in tiles; fewer are as fast in vectors

static int int8_takes_tiles(const Task *t) { return HAS_INT8_TILES && way == TILES && t->m >= INT8_FEWEST; }

static int int8_prepare(Task *t) { return round_inputs(t, INT8_GROUP, BYTE_OFFSET); }

static void int8_begin(const Task *t) {
  if (int8_takes_tiles(t)) configure_whole_tiles();
}

static void int8_end(const Task *t) {
  if (int8_takes_tiles(t)) release_tiles();
}

static void int8_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  (int8_takes_tiles(t) ? int8_tiles : int8_vectors)(t, p, first, last, next, bytes);
}
