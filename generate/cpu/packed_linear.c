// Linear layers of the CPU engine: y = activation(x W^T + bias) or x W^T + bias + residual, for any number of rows,
// from one, which memory limits, to hundreds, which arithmetic limits. x and y are bfloat16, sums float32. Each format
// of weights has a header that multiplies rows by a panel; what they share is in panels.h.
//
// In every format an output is summed in an order that depends on K alone, not on the number of rows, not on threads.
// So a token's numbers are the same alone and in any batch, bit for bit.
//
// A gated MLP's first layer multiplies activation(gate) and up, halves of one product; its panels hold 16 rows of gate,
// the same 16 of up, and again, so that both sums of an output meet in registers.
//
// Weights W [N, K] are packed once into panels of 64 outputs. Each panel serves all rows while it lies in the
// second-level cache, and the next one is fetched meanwhile.
#include "linear_bf16.h"
#include "linear_blocks.h"
#include "linear_int8.h"

enum { ALONE = 1 << 18 };  // multiplications not worth another thread

static const Format formats[] = {
    [BFLOAT16] = {bfloat16_panel_bytes, bfloat16_pack_panel, bfloat16_prepare, HAS_FMA ? bfloat16_panel : 0,
                  bfloat16_begin, bfloat16_end},
    [INT8] = {int8_panel_bytes, int8_pack_panel, int8_prepare, int8_panel, int8_begin, int8_end},
    [Q4_0] = {q4_0_panel_bytes, q4_0_pack_panel, q4_0_prepare, q4_0_panel, blocks_begin, blocks_end},
    [Q4_1] = {q4_1_panel_bytes, q4_1_pack_panel, q4_1_prepare, q4_1_panel, blocks_begin, blocks_end},
    [Q8_0] = {q8_0_panel_bytes, q8_0_pack_panel, q8_0_prepare, q8_0_panel, blocks_begin, blocks_end},
};

int packed_linear_supported(int format) { return formats[format].product != 0; }

static int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }

static int64_t panel_bytes(int format, int64_t k) { return formats[format].panel_bytes(k); }

int64_t packed_linear_bytes(int format, int64_t n, int64_t k) { return panels_of(n) * panel_bytes(format, k); }

typedef struct {
  int format, gated;
  const void *w;
  char *packed;
  int64_t n, k;
} Packing;

static void pack_panels(void *job, int64_t first, int64_t last, int worker) {
  const Packing *t = job;
  for (int64_t p = first; p < last; p++)
    formats[t->format].pack_panel(t->w, t->packed + p * panel_bytes(t->format, t->k), p, t->n, t->k, t->gated);
}

void packed_linear_pack(int format, const void *w, void *packed, int64_t n, int64_t k, int gated) {
  Packing t = {format, gated, w, packed, n, k};
  share_out(pack_panels, &t, panels_of(n), 1);
}

typedef struct {
  Task task;
  const Linear *next;  // the weight that is read after this one, or null
} Product;

static void panels_of_bands(void *job, int64_t from, int64_t to, int worker) {
  const Product *product = job;
  const Task *t = &product->task;
  const Linear *after = product->next;
  const Format *format = &formats[t->w->format];
  int64_t bytes_each = panel_bytes(t->w->format, t->k);
  int64_t bands = (t->m + t->band - 1) / t->band, end = share_end(t->panels * bands, worker, workers);
  if (format->begin) format->begin(t);
  for (int64_t i = from; i < to; i++) {
    int64_t p = i / bands, first = i % bands * t->band, last = first + t->band < t->m ? first + t->band : t->m;
    const char *next = (const char *)t->w->packed + (p + 1) * bytes_each + i % bands * bytes_each / bands;
    int64_t bytes = p + 1 < t->panels ? bytes_each / bands : 0;
    if (i + 1 == end) {  // the worker's share is done: on to where its share of the next weight begins
      bytes = after ? panel_bytes(after->format, after->k) : 0;
      next = after ? (const char *)after->packed + share_end(panels_of(after->n), worker - 1, workers) * bytes : 0;
    }
    format->product(t, p, first, last, next, bytes);
  }
  if (format->end) format->end(t);
}

// Rows of a band. Bands share a panel: beyond some hundreds of rows, and where workers would have unequal numbers of
// panels, so few that one more matters.
static int64_t band_of(int format, int64_t m, int64_t panels) {
  const int in_blocks = way == FMA && !WIDENS_FIRST;  // bfloat16 costs the same in any whole blocks of rows
  // Rows that take no longer than in more, and a multiple of the rows of tiles and of blocks.
  const int64_t fewest = format == BFLOAT16 ? in_blocks ? 4 * FMA_ROWS : BAND : LANES == 16 ? 32 : 8;
  const int64_t multiple = format == BFLOAT16 ? in_blocks ? FMA_ROWS : 48 : HAS_TILES ? 16 : 4;
  int64_t bands = (m + BAND - 1) / BAND;
  while (panels * bands % workers && panels * bands < 16 * workers && m >= (bands + 1) * fewest) bands++;
  return bands > 1 ? padded((m + bands - 1) / bands, multiple) : BAND;
}

void packed_linear(const Linear *w, const bf16 *x, const bf16 *residual, void *out, int64_t m, int mode,
                   const Linear *next, const Extra *extra) {
  const Format *format = &formats[w->format];
  Product t = {{w, x, residual, out, m, w->n, w->k, mode, panels_of(w->n), 0}, next};
  t.task.band = band_of(w->format, m, t.task.panels);
  const int64_t items = t.task.panels * ((m + t.task.band - 1) / t.task.band), each = items / (2 * workers);
  t.task.extra = extra;
  if (!format->prepare(&t.task)) {
    memset(out, 0xff, (size_t)(m * (mode == SWIGLU ? w->n / 2 : w->n)) * (mode == FLOAT32 ? 4 : 2));  // all NaN
    return;
  }
  if (m * w->n * w->k < ALONE) share_among(1, panels_of_bands, &t, items, items);
  else share_out(panels_of_bands, &t, items, each < 1 ? 1 : each > 4 ? 4 : each);
}
