// Low-rank products of many adapters in one step (Punica's SGMV, Chen et al., 2023): rows with the same adapter lie
// together, so its numbers are read once for all of them. Rows without an adapter are not touched.
//
// For a linear layer, a row's `rank` sums of A x are computed first, then what B makes of them. Both are float32 and
// summed in an order that depends on the layer's sizes alone, so a row's bits do not depend on the rows beside it. A is
// [rank, k] with k filled up to a multiple of 16 and rank to one of 4, B is in panels [n / 64][rank][64].
#include "kernels.h"
#include "team.h"
#include "vectors.h"

enum { RANKS = LOW_RANK_STEP, ROWS = 4, PANEL = LOW_RANK_PANEL, PANELS_AT_ONCE = 4 };

typedef struct {
  const Adapters *adapters;
  const void *x;
  int64_t place, k, n, blocks;  // place: of the layer in an adapter's table; blocks: items of each group
  int wide;
} Work;

// The adapter's part in this layer, or null.
INLINE const LowRank *part_of(const Work *t, int64_t group) {
  const LowRank *part = (const LowRank *)t->adapters->tables[group] + t->place;
  return part->rank ? part : 0;
}

INLINE vec load(const void *from, int64_t at, int64_t count, int wide) {
  return wide ? load_floats((const float *)from + at, count) : load_bf16((const bf16 *)from + at, count);
}

static float total(vec v) {
  float lanes[LANES], sum = 0;
  store_floats(lanes, v, LANES);
  for (int j = 0; j < LANES; j++) sum += lanes[j];
  return sum;
}

// `count` rows from `first` on of the step's adapter rows, RANKS rows of A from `rank` on.
INLINE void shrink_tile(const Work *t, const LowRank *part, int64_t first, int count, int64_t rank, int wide) {
  const Adapters *all = t->adapters;
  const int64_t k = t->k, width = (k + LOW_RANK_INPUTS - 1) / LOW_RANK_INPUTS * LOW_RANK_INPUTS;
  vec sum[ROWS][RANKS];
  int64_t row[ROWS];
  UNROLL for (int r = 0; r < count; r++) {
    row[r] = (int64_t)all->row[first + r] * k;
    UNROLL for (int j = 0; j < RANKS; j++) sum[r][j] = (vec){0};
  }
  const int64_t whole = k / LANES * LANES;
  for (int64_t i = 0; i < k; i += LANES) {
    const int64_t left = i < whole ? LANES : k - i;
    vec a[RANKS];
    UNROLL for (int j = 0; j < RANKS; j++) a[j] = load(part->a, (rank + j) * width + i, LANES, wide);
    UNROLL for (int r = 0; r < count; r++) {
      vec x = load(t->x, row[r] + i, left, wide);
      UNROLL for (int j = 0; j < RANKS; j++) sum[r][j] = fused(x, a[j], sum[r][j]);
    }
  }
  UNROLL for (int r = 0; r < count; r++)
    UNROLL for (int j = 0; j < RANKS; j++)
      all->middle[(first + r) * all->most_rank + rank + j] = total(sum[r][j]);
}

INLINE void shrink_rows(const Work *t, const LowRank *part, int64_t first, int64_t last, int64_t rank, int wide) {
  for (int64_t row = first; row < last; row += ROWS) {
    switch (last - row) {
      case 1: shrink_tile(t, part, row, 1, rank, wide); break;
      case 2: shrink_tile(t, part, row, 2, rank, wide); break;
      case 3: shrink_tile(t, part, row, 3, rank, wide); break;
      default: shrink_tile(t, part, row, ROWS, rank, wide);
    }
  }
}

static void shrink(void *job, int64_t from, int64_t to, int worker) {
  const Work *t = job;
  for (int64_t i = from; i < to; i++) {
    const int64_t group = i / t->blocks, rank = i % t->blocks * RANKS;
    const LowRank *part = part_of(t, group);
    if (!part || rank >= part->rank) continue;
    const int64_t first = t->adapters->begin[group], last = t->adapters->begin[group + 1];
    if (t->wide) shrink_rows(t, part, first, last, rank, 1);
    else shrink_rows(t, part, first, last, rank, 0);
  }
}

// A panel of outputs for `count` rows from `first` on, which are written into their sums.
INLINE void expand_tile(const Work *t, const Up *up, int64_t panel, int64_t first, int count, int wide) {
  const Adapters *all = t->adapters;
  const int64_t at = panel * PANEL, left = up->count - at;
  for (int half = 0; half < PANEL; half += 4 * LANES) {
    vec sum[ROWS][4];
    UNROLL for (int r = 0; r < count; r++)
      UNROLL for (int j = 0; j < 4; j++) sum[r][j] = (vec){0};
    for (int64_t i = 0; i < up->rank; i++) {
      vec b[4];
      UNROLL for (int j = 0; j < 4; j++)
        b[j] = load(up->b, (panel * up->rank + i) * PANEL + half + j * LANES, LANES, wide);
      UNROLL for (int r = 0; r < count; r++) {
        vec one = all_of(all->middle[(first + r) * all->most_rank + up->first + i]);
        UNROLL for (int j = 0; j < 4; j++) sum[r][j] = fused(one, b[j], sum[r][j]);
      }
    }
    UNROLL for (int r = 0; r < count; r++)
      UNROLL for (int j = 0; j < 4; j++)
        store_floats(all->sums + (first + r) * t->n + up->start + at + half + j * LANES, sum[r][j],
                     left - half - j * LANES);
  }
}

INLINE void expand_rows(const Work *t, const Up *up, int64_t panel, int64_t first, int64_t last, int wide) {
  for (int64_t row = first; row < last; row += ROWS) {
    switch (last - row) {
      case 1: expand_tile(t, up, panel, row, 1, wide); break;
      case 2: expand_tile(t, up, panel, row, 2, wide); break;
      case 3: expand_tile(t, up, panel, row, 3, wide); break;
      default: expand_tile(t, up, panel, row, ROWS, wide);
    }
  }
}

// Some panels of outputs of the rows of a group.
static void expand(void *job, int64_t from, int64_t to, int worker) {
  const Work *t = job;
  const Adapters *all = t->adapters;
  for (int64_t i = from; i < to; i++) {
    const int64_t group = i / t->blocks, first = all->begin[group], last = all->begin[group + 1];
    const LowRank *part = part_of(t, group);
    for (int64_t u = 0; part && u < part->n_ups; u++) {
      const Up *up = (const Up *)part->ups + u;
      const int64_t panels = (up->count + PANEL - 1) / PANEL;
      for (int64_t p = i % t->blocks * PANELS_AT_ONCE, end = p + PANELS_AT_ONCE; p < end && p < panels; p++) {
        if (t->wide) expand_rows(t, up, p, first, last, 1);
        else expand_rows(t, up, p, first, last, 0);
      }
    }
  }
}

int low_rank(const Adapters *adapters, int64_t place, const void *x, int64_t k, int64_t n, int wide) {
  Work t = {adapters, x, place, k, n, 0, wide};
  int64_t rank = 0;
  int whole = 1;  // all sums are written by `expand`
  for (int64_t group = 0; group < adapters->groups; group++) {
    const LowRank *part = part_of(&t, group);
    int64_t covered = 0;
    for (int64_t u = 0; part && u < part->n_ups; u++) covered += ((const Up *)part->ups)[u].count;
    whole &= covered == n;
    if (part && part->rank > rank) rank = part->rank;
  }
  if (!rank) return 0;
  if (!whole) memset(adapters->sums, 0, (size_t)(adapters->rows * n) * sizeof(float));
  t.blocks = rank / RANKS;
  share_out(shrink, &t, adapters->groups * t.blocks, 1);
  t.blocks = ((n + PANEL - 1) / PANEL + PANELS_AT_ONCE - 1) / PANELS_AT_ONCE;
  share_out(expand, &t, adapters->groups * t.blocks, 1);
  return 1;
}
