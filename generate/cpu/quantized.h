// What formats with weights of 8 bits or fewer share: inputs rounded to bytes with a scale for each group of them, and
// products of bytes. Sums of such products are exact in int32, so tiles and vectors of any width give the same bits,
// and a product may take whichever is faster for its number of rows.
#pragma once
#include <math.h>
#include <stdlib.h>

#include "bytes.h"
#include "panels.h"
#include "tiles.h"

enum { WHOLE_TILE = 16, WIDEST_GROUP = 64 };  // rows are allocated in multiples of a tile's
enum { FEW_ROWS = 8 };                        // not worth another thread

// A group of inputs: bytes up to 127 times peak / 127. All outputs of a row that has an infinity or a NaN are NaN. A
// group of numbers so small that 127 / peak overflows is zero.
INLINE void round_group(const bf16 *x, int8_t *bytes, float *scale, int32_t *start, int group, int offset) {
  uvec most = {0};
  UNROLL for (int i = 0; i < group; i += LANES) most = larger_of(most, magnitude(load_bf16(x + i, LANES)));
  uint32_t bits = largest_of(most);
  float peak;
  memcpy(&peak, &bits, 4);
  float inverse = peak < 1e-30f ? 0 : 127.f / peak;
  ivec sum = {0};
  UNROLL for (int i = 0; i < group; i += LANES) {
    ivec number = rounded(load_bf16(x + i, LANES) * inverse);
    store_bytes(bytes + i, number);
    sum += number;
  }
  *scale = bits < 0x7f800000 ? peak / 127.f : NAN;
  *start = -offset * sum_of(sum);
  const float total = *scale * (float)*start;
  if (offset < 0) memcpy(start, &total, sizeof total);
}

// The sum of a group of inputs, where the offset is negative.
INLINE float total_at(const int32_t *start) {
  float total;
  memcpy(&total, start, sizeof total);
  return total;
}

INLINE void round_row(const Inputs *in, int64_t row, int group) {
  const bf16 *x = in->x + row * in->k;
  int8_t *bytes = in->bytes + row * in->stride;
  float *scales = in->scales + row * in->groups;
  int32_t *starts = in->starts + row * in->groups;
  for (int64_t g = 0; g < in->groups; g++) {
    bf16 last[WIDEST_GROUP] = {0};
    const bf16 *from = x + g * group;
    if ((g + 1) * group > in->k) from = memcpy(last, from, (size_t)(in->k - g * group) * sizeof *last);
    round_group(from, bytes + g * group, scales + g, starts + g, group, in->offset);
  }
}

static void round_rows(void *job, int64_t first, int64_t last, int worker) {
  const Inputs *in = job;
  for (int64_t row = first; row < last; row++)
    if (in->group == 64) round_row(in, row, 64);
    else round_row(in, row, 32);
}

// Rounds the rows of a product to bytes. Returns 0 where there is no memory.
static int round_inputs(Task *t, int group, int offset) {
  int64_t rows = padded(t->m, WHOLE_TILE), groups = padded(t->k, group) / group, stride = padded(t->k, WIDEST_GROUP);
  if (stride % 512 == 0) stride += 64;  // else rows share few sets of the first-level cache
  char *memory = scratch(rows * (stride + 8 * groups));
  if (!memory) return 0;
  float *scales = (float *)(memory + rows * stride);
  // Tiles multiply these rows, too.
  memset(scales + t->m * groups, 0, (size_t)((rows - t->m) * groups) * sizeof *scales);
  t->in = (Inputs){t->x, (int8_t *)memory, scales, (int32_t *)(scales + rows * groups),
                   t->k, stride, groups, group, offset};
  share_out(round_rows, &t->in, t->m, FEW_ROWS);
  return 1;
}
