// What linear layers of every weight format share: a product's task, and what becomes of a panel's sums: bias,
// activation, residual and rounding. A panel is the weight's rows for 64 outputs.
#pragma once
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "team.h"
#include "vectors.h"

enum { PANEL = 64 };

// The rows of a product, rounded to bytes for a format of weights that multiplies bytes; see quantized.h. Each row has
// `stride` bytes, whole groups, with zeros behind k; and `groups` scales and starts. A start is what the sum of a
// group's products begins with, -offset times the sum of its bytes, since weights are stored with `offset` added.
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
  Inputs in;             // only for formats with groups
} Task;

// Multiplies rows first up to last by panel p, while `bytes` from `next` on, the weight that is read next, are fetched.
typedef void PanelProduct(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes);

// A format of weights, from its own header.
typedef struct {
  int64_t (*panel_bytes)(int64_t k);
  void (*pack_panel)(const void *w, char *packed, int64_t p, int64_t n, int64_t k, int gated);
  PanelProduct *product;
  void (*begin)(const Task *t), (*end)(const Task *t);  // around a worker's panels, or null
  int group, offset;  // inputs with a scale of their own, 0 for inputs as they are; what is added to weights
} Format;

// The row of a weight [n, k] that is output `at` of its panels, or n where there is none.
static int64_t packed_row(int64_t at, int64_t n, int gated) {
  if (!gated) return at < n ? at : n;
  int64_t inner = n / 2, row = at / 32 * 16 + at % 16;
  return row >= inner ? n : at / 16 % 2 ? inner + row : row;
}

// LANES sums to outputs col and following of a row.
INLINE void put(const Task *t, int64_t row, int64_t col, vec sum) {
  int64_t at = row * t->n + col, count = t->n - col;
  vec y = t->w->bias ? sum + load_floats(t->w->bias + col, count) : sum;
  if (t->mode == FLOAT32) {
    store_floats((float *)t->out + at, y, count);
    return;
  }
  if (t->mode == GELU_TANH) y = gelu_of(y);
  if (t->residual) y += load_bf16(t->residual + at, count);
  store_bf16((bf16 *)t->out + at, y, count);
}

// LANES sums of gate and of up make products col and following of a row.
INLINE void put_gated(const Task *t, int64_t row, int64_t col, vec gate, vec up) {
  int64_t inner = t->n / 2, count = inner - col;
  if (t->w->bias) {
    gate += load_floats(t->w->bias + col, count);
    up += load_floats(t->w->bias + inner + col, count);
  }
  store_bf16((bf16 *)t->out + row * inner + col, silu_of(gate) * up, count);
}

// The sums of panel p for a row: PANEL of them.
APART void put_panel(const Task *t, int64_t row, int64_t p, const float *sums) {
  if (t->mode == SWIGLU)
    for (int j = 0; j < PANEL / 2; j += LANES) {
      const float *gate = sums + j / 16 * 32 + j % 16;
      put_gated(t, row, p * PANEL / 2 + j, load_floats(gate, LANES), load_floats(gate + 16, LANES));
    }
  else
    for (int j = 0; j < PANEL; j += LANES) put(t, row, p * PANEL + j, load_floats(sums + j, LANES));
}

INLINE const char *fetch(const char *from, int lines) {
  for (int l = 0; l < lines; l++) __builtin_prefetch(from + 64 * l, 0, 2);
  return from + 64 * lines;
}
