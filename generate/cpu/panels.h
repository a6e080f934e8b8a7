// What linear layers of every weight format share: a product's task, and what becomes of a panel's sums: bias,
// activation, residual and rounding. A panel is the weight's rows for 64 outputs.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "team.h"
#include "vectors.h"

enum { PANEL = 64, PART = 4 * LANES < PANEL ? 4 * LANES : PANEL };  // PART: outputs whose biases fit the registers
enum { BAND = 192, SLICE_BYTES = 1 << 14 };  // rows at most of a product; weights that the first-level cache keeps

// The rows of a product, rounded to bytes for a format of weights that multiplies bytes; see quantized.h. Each row has
// `stride` bytes, whole groups, with zeros behind k; and `groups` scales and starts. A start is what the sum of a
// group's products begins with, -offset times the sum of its bytes, since weights are stored with `offset` added; for a
// negative offset it is that times the scale, as a float32.
typedef struct {
  const bf16 *x;
  int8_t *bytes;
  float *scales;
  int32_t *starts;
  int64_t k, stride, groups;
  int group, offset;
} Inputs;

typedef struct {
  const Linear *w;
  const bf16 *x, *residual;
  void *out;
  int64_t m, n, k;
  int mode;
  int64_t panels, band;  // of rows
  bf16 *tiled;           // x in tiles, for those that take it so
  Inputs in;             // only for formats with groups
  const Extra *extra;    // or null
} Task;

// Multiplies rows first up to last by panel p, while `bytes` from `next` on, the weight that is read next, are fetched.
typedef void PanelProduct(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes);

// A format of weights, from its own header.
typedef struct {
  int64_t (*panel_bytes)(int64_t k);
  void (*pack_panel)(const void *w, char *packed, int64_t p, int64_t n, int64_t k, int gated);
  int (*prepare)(Task *t);  // lays out the rows; returns 0 where there is no memory
  PanelProduct *product;
  void (*begin)(const Task *t), (*end)(const Task *t);  // around a worker's panels, or null
} Format;

// The row of a weight [n, k] that is output `at` of its panels, or n where there is none.
static int64_t packed_row(int64_t at, int64_t n, int gated) {
  if (!gated) return at < n ? at : n;
  int64_t inner = n / 2, row = at / 32 * 16 + at % 16;
  return row >= inner ? n : at / 16 % 2 ? inner + row : row;
}

// LANES sums to outputs col and following of a row, `count` of which there are.
INLINE void put(const Task *t, int mode, const bf16 *residual, int64_t row, int64_t col, vec sum, vec bias,
                int64_t count) {
  const int64_t at = row * t->n + col;
  vec y = sum + bias;
  if (mode == FLOAT32) {
    store_floats((float *)t->out + at, y, count);
    return;
  }
  if (mode == GELU_TANH) y = gelu_of(y);
  if (mode == GELU_ERF) y = gelu_erf_of(y);
  if (residual) y += load_bf16(residual + at, count);
  store_bf16((bf16 *)t->out + at, y, count);
}

// Rows of sums [PANEL] become outputs of panel p. `whole`: the panel has no outputs behind the last one.
INLINE void put_plain(const Task *t, int mode, const bf16 *residual, int64_t row, int64_t rows, int64_t p,
                      const float *sums, int whole) {
  for (int j = 0; j < PANEL; j += PART) {
    vec bias[PART / LANES];
    UNROLL for (int i = 0; i < PART; i += LANES) {
      int64_t col = p * PANEL + j + i;
      bias[i / LANES] = t->w->bias ? load_floats(t->w->bias + col, whole ? LANES : t->n - col) : (vec){0};
    }
    for (int64_t r = 0; r < rows; r++)
      UNROLL for (int i = 0; i < PART; i += LANES) {
        int64_t col = p * PANEL + j + i;
        vec sum = load_floats(sums + r * PANEL + j + i, LANES);
        put(t, mode, residual, row + r, col, sum, bias[i / LANES], whole ? LANES : t->n - col);
      }
  }
}

// As put_plain(): sums of gate and of up, 16 each in turn, make half as many products.
INLINE void put_gated(const Task *t, int64_t row, int64_t rows, int64_t p, const float *sums, int whole) {
  const int64_t inner = t->n / 2;
  for (int j = 0; j < PANEL / 2; j += LANES) {
    const int64_t col = p * PANEL / 2 + j, count = whole ? LANES : inner - col;
    const vec of_gate = t->w->bias ? load_floats(t->w->bias + col, count) : (vec){0};
    const vec of_up = t->w->bias ? load_floats(t->w->bias + inner + col, count) : (vec){0};
    for (int64_t r = 0; r < rows; r++) {
      const float *gate = sums + r * PANEL + j / 16 * 32 + j % 16;
      vec y = silu_of(load_floats(gate, LANES) + of_gate) * (load_floats(gate + 16, LANES) + of_up);
      store_bf16((bf16 *)t->out + (row + r) * inner + col, y, count);
    }
  }
}

// Adds what some rows have in addition to their sums of panel p.
static void add_extra(const Task *t, int64_t row, int64_t rows, int64_t p, float *sums) {
  const int gated = t->mode == SWIGLU;
  for (int64_t r = 0; r < rows; r++, sums += PANEL) {
    const int32_t at = t->extra->of_row[row + r];
    for (int64_t j = 0; at >= 0 && j < PANEL; j += 16) {
      const int64_t output = packed_row(p * PANEL + j, t->n, gated), end = gated && output < t->n / 2 ? t->n / 2 : t->n;
      const float *extra = t->extra->sums + at * t->n;
      for (int64_t i = 0; i < 16; i += LANES) {
        vec more = load_floats(extra + output + i, end - output - i);
        store_floats(sums + j + i, load_floats(sums + j + i, LANES) + more, LANES);
      }
    }
  }
}

// `rows` rows of sums [PANEL] of panel p, from `row` on, to their outputs.
APART void put_rows(const Task *t, int64_t row, int64_t rows, int64_t p, float *sums) {
  if (t->extra) add_extra(t, row, rows, p, sums);
  if (t->mode == SWIGLU) {
    if ((p + 1) * PANEL <= t->n) put_gated(t, row, rows, p, sums, 1);
    else put_gated(t, row, rows, p, sums, 0);
  } else if ((p + 1) * PANEL > t->n) put_plain(t, t->mode, t->residual, row, rows, p, sums, 0);
  else if (t->mode == FLOAT32) put_plain(t, FLOAT32, 0, row, rows, p, sums, 1);
  else if (t->mode == GELU_TANH) put_plain(t, GELU_TANH, t->residual, row, rows, p, sums, 1);
  else if (t->mode == GELU_ERF) put_plain(t, GELU_ERF, t->residual, row, rows, p, sums, 1);
  else if (t->residual) put_plain(t, PLAIN, t->residual, row, rows, p, sums, 1);
  else put_plain(t, PLAIN, 0, row, rows, p, sums, 1);
}

static int64_t padded(int64_t k, int64_t group) { return (k + group - 1) / group * group; }

// Memory of this thread, until its next call: it grows with the largest product. Null where there is none.
static void *scratch(int64_t bytes) {
  static _Thread_local char *memory;
  static _Thread_local int64_t size;
  if (bytes > size) {
    free(memory);
    size = padded(bytes, 1 << 16);
    memory = aligned_alloc(64, (size_t)size);
    if (!memory) size = 0;
    else memset(memory, 0, (size_t)size);
  }
  return memory;
}

INLINE const char *fetch(const char *from, int lines) {
  for (int l = 0; l < lines; l++) __builtin_prefetch(from + 64 * l, 0, 2);
  return from + 64 * lines;
}

// What a block of rows fetches: at each of its steps `count` addresses, `apart` bytes from each other, which is less than
// a line where there are more steps than lines.
typedef struct {
  const char *from;
  int64_t apart;
  int count;
} Ahead;

// The share of block `b` of `blocks`, each of `steps` steps, in the `bytes` from `next` on. Steps fetch evenly, since a
// core has few buffers for lines that are under way; to fetch a line twice, or some of the next share, costs less than
// to see that it is fetched.
INLINE Ahead share_of(const char *next, int64_t bytes, int64_t b, int64_t blocks, int64_t steps) {
  const int64_t all = blocks * steps, count = (bytes / 64 + all - 1) / all;
  return (Ahead){next + bytes * b / blocks, count > 1 ? 64 : count ? bytes / all : 0, (int)count};
}

// How many of `units` a slice has: at most `most`, and all slices as many, since a whole one is fetched while a short one
// is multiplied.
INLINE int64_t evenly(int64_t units, int64_t most) {
  const int64_t slices = (units + most - 1) / most;
  return (units + slices - 1) / slices;
}

// `count` of a panel's units, such as pairs of inputs, at `w`, and what is fetched while they are multiplied.
typedef struct {
  const char *w, *then;
  int64_t count, bytes;
} Slice;

// The units of a panel from `from` on, `most` at once, each of `size` bytes. Behind the last, `bytes` from `next` on
// are fetched.
INLINE Slice slice_at(const char *panel, int64_t from, int64_t units, int64_t most, int64_t size, const char *next,
                      int64_t bytes) {
  const int64_t left = units - from, count = left < most ? left : most;
  const char *w = panel + from * size;
  if (left > most) next = w + count * size, bytes = (left - count) * size;
  return (Slice){w, next, count, bytes < most * size ? bytes : most * size};
}

INLINE void fetch_step(Ahead *a) {
  for (int i = 0; i < a->count; i++, a->from += a->apart) __builtin_prefetch(a->from, 0, 2);
}
