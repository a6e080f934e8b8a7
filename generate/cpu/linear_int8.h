// Linear layers with weights of 8 bits, a scale for each output, and inputs rounded to 8 bits in groups of 64.
//
// An output is the sum over its groups, in their order, of (int32 sum of products) * (the group's scale), each step
// fused where the processor can, and at last times the output's scale.
#pragma once
#include "int8_tiles.h"

// What is added to the weights when they are stored. Tiles need no offset, but vectors flip the sign then.
enum { INT8_FLIPS = HAS_INT8_TILES, INT8_STORED = INT8_FLIPS ? 0 : BYTE_OFFSET };

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

// For many rows, float sums stay in memory: GCC would keep them in registers that it lacks, and copy them forth and
// back.
#define IN_MEMORY() if (R * V > 12) __asm__ volatile("" : : : "memory")

// One row reads a panel straight through on AVX2, which memory likes best.
enum { INT8_VECTORS = PAIRS_OF_BYTES ? PANEL / LANES : 4 };
INLINE int int8_vectors_of(int64_t rows) { return rows == 1 ? INT8_VECTORS : PAIRS_OF_BYTES && rows > 2 ? 2 : 4; }

// Steps from one fetch to the next: with many short products, a look at each takes a tenth of their time.
INLINE int int8_fetch_every(int64_t rows) { return PAIRS_OF_BYTES && rows >= INT8_ROWS ? 4 : 1; }

// R rows from `row` on times groups `from` to `to` of a panel are added to sums, V vectors of outputs at a time. The
// sums stay in the first-level cache, since they are needed once for 64 inputs.
INLINE void int8_block(const Task *t, int64_t row, const char *w, int64_t from, int64_t to, int R, float *sums,
                       Ahead ahead) {
  const int V = int8_vectors_of(R);
  const Inputs *in = &t->in;
  if (!from) memset(sums, 0, (size_t)R * PANEL * sizeof *sums);
  for (int at = 0; at < PANEL; at += V * LANES) {
    const int8_t *x = in->bytes + row * in->stride + from * INT8_GROUP;
    const char *step = w + 4 * at;
    for (int64_t g = from; g < to; g++) {
      ivec acc[INT8_ROWS][INT8_VECTORS];
      UNROLL for (int r = 0; r < R; r++) {
        ivec start = all_of_int(in->starts[(row + r) * in->groups + g]);
        UNROLL for (int j = 0; j < V; j++) acc[r][j] = start;
      }
      for (int s = 0; s < INT8_GROUP / 4; s += int8_fetch_every(R)) {
        fetch_step(&ahead);
        UNROLL for (int i = 0; i < int8_fetch_every(R); i++, x += 4, step += 4 * PANEL) {
          ivec weights[INT8_VECTORS];
          UNROLL for (int j = 0; j < V; j++) {
            weights[j] = load_ints(step + 4 * LANES * j);
            if (INT8_FLIPS) weights[j] ^= (int32_t)0x80808080;
          }
          UNROLL for (int r = 0; r < R; r++) {
            ivec four = four_bytes(x + r * in->stride);
            UNROLL for (int j = 0; j < V; j++) acc[r][j] = dot(acc[r][j], weights[j], four);
          }
        }
      }
      IN_MEMORY();
      UNROLL for (int r = 0; r < R; r++) {
        vec scale = all_of(in->scales[(row + r) * in->groups + g]);
        UNROLL for (int j = 0; j < V; j++) {
          float *sum = sums + r * PANEL + at + j * LANES;
          store_floats(sum, fused(__builtin_convertvector(acc[r][j], vec), scale, load_floats(sum, LANES)), LANES);
        }
      }
      IN_MEMORY();
    }
  }
}

static void int8_rows(const Task *t, int64_t row, int64_t rows, const char *w, int64_t from, int64_t to, float *sums,
                      Ahead ahead) {
  switch (rows) {
    case 1: int8_block(t, row, w, from, to, 1, sums, ahead); break;
#if LANES == 16 || defined(__aarch64__)
    case 2: int8_block(t, row, w, from, to, 2, sums, ahead); break;
    case 3: int8_block(t, row, w, from, to, 3, sums, ahead); break;
    case 4: int8_block(t, row, w, from, to, 4, sums, ahead); break;
    case 5: int8_block(t, row, w, from, to, 5, sums, ahead); break;
#elif PAIRS_OF_BYTES
    case 2: int8_block(t, row, w, from, to, 2, sums, ahead); break;
    case 3: int8_block(t, row, w, from, to, 3, sums, ahead); break;
#elif defined(__AVXVNNI__)
    case 2: int8_block(t, row, w, from, to, 2, sums, ahead); break;
#endif
    default: int8_block(t, row, w, from, to, INT8_ROWS, sums, ahead);
  }
}

// Rows first up to last times panel p; meanwhile `bytes` from `next` on are fetched. Several blocks of rows take a
// slice of the panel one after the other, as in dot_panel().
static void int8_vectors(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  float sums[BAND * PANEL] __attribute__((aligned(64)));
  const int64_t groups = t->in.groups, blocks = (last - first + INT8_ROWS - 1) / INT8_ROWS;
  const int64_t most = evenly(groups, blocks == 1 ? groups : SLICE_BYTES / 2 / GROUP_BYTES);
  const char *w = (const char *)t->w->packed + p * int8_panel_bytes(t->k);
  const float *scales = (const float *)(w + groups * GROUP_BYTES);
  for (int64_t from = 0; from < groups; from += most) {
    const Slice s = slice_at(w, from, groups, most, GROUP_BYTES, next, bytes);
    for (int64_t b = 0, row = first, rows; b < blocks; b++, row += rows) {
      rows = (last - row + blocks - b - 1) / (blocks - b);  // equal blocks: short ones multiply slower
      const int64_t steps = s.count * (INT8_GROUP / 4) / int8_fetch_every(rows);
      const int parts = PANEL / LANES / int8_vectors_of(rows);
      int8_rows(t, row, rows, s.w, from, from + s.count, sums + (row - first) * PANEL,
                share_of(s.then, s.bytes, b, blocks, steps * parts));
    }
  }
  for (int j = 0; j < PANEL; j += LANES) {
    const vec scale = load_floats(scales + j, LANES);
    for (float *sum = sums + j; sum < sums + (last - first) * PANEL; sum += PANEL)
      store_floats(sum, load_floats(sum, LANES) * scale, LANES);
  }
  put_rows(t, first, last - first, p, sums);
}

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
