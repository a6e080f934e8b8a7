// Linear layers of the CPU engine: y = activation(x W^T + bias) or x W^T + bias + residual, for any number of rows,
// from one, which memory limits, to hundreds, which arithmetic limits. x and y are bfloat16, sums float32. Each format of
// weights has a header that multiplies rows by a panel; what they share is in panels.h.
//
// In every format an output is summed in an order that depends on K alone, not on the number of rows, not on threads. So
// a token's numbers are the same alone and in any batch, bit for bit.
//
// A gated MLP's first layer multiplies activation(gate) and up, halves of one product; its panels hold 16 rows of gate,
// the same 16 of up, and again, so that both sums of an output meet in registers.
//
// Weights W [N, K] are packed once into panels of 64 outputs. Each panel serves all rows while it lies in the
// second-level cache, and the next one is fetched meanwhile.
#include "linear_bf16.h"

enum { ALONE = 1 << 18 };  // multiplications not worth another thread

int packed_linear_supported(void) { return HAS_FMA; }

static int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }

static int64_t panel_bytes(int format, int64_t k) { return bfloat16_panel_bytes(k); }

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
    bfloat16_pack_panel(t->w, t->packed + p * panel_bytes(t->format, t->k), p, t->n, t->k, t->gated);
}

void packed_linear_pack(int format, const void *w, void *packed, int64_t n, int64_t k, int gated) {
  Packing t = {format, gated, w, packed, n, k};
  share_out(pack_panels, &t, panels_of(n), 1);
}

typedef struct {
  Task task;
  const Linear *next;  // the weight that is read after this one, or null
  PanelProduct *product;
} Product;

static void panels_of_bands(void *job, int64_t from, int64_t to, int worker) {
  const Product *product = job;
  const Task *t = &product->task;
  const Linear *after = product->next;
  int64_t bytes_each = panel_bytes(t->w->format, t->k);
  int64_t bands = (t->m + t->band - 1) / t->band, end = share_end(t->panels * bands, worker, workers);
  bfloat16_begin(t);
  for (int64_t i = from; i < to; i++) {
    int64_t p = i % t->panels, first = i / t->panels * t->band, last = first + t->band < t->m ? first + t->band : t->m;
    const char *next = (const char *)t->w->packed + (p + 1) * bytes_each;
    int64_t bytes = p + 1 < t->panels ? bytes_each : 0;
    if (i + 1 == end) {  // the worker's share is done: on to where its share of the next weight begins
      bytes = after ? panel_bytes(after->format, after->k) : 0;
      next = after ? (const char *)after->packed + share_end(panels_of(after->n), worker - 1, workers) * bytes : 0;
    }
    product->product(t, p, first, last, next, bytes);
  }
  bfloat16_end(t);
}

// Rows beyond some hundreds are cut into bands, so that many cores find work in few panels.
void packed_linear(const Linear *w, const bf16 *x, const bf16 *residual, void *out, int64_t m, int mode,
                   const Linear *next) {
  Product t = {{w, x, residual, out, m, w->n, w->k, mode, panels_of(w->n), 192}, next, bfloat16_panel};
  int64_t items = t.task.panels * ((m + t.task.band - 1) / t.task.band), each = items / (2 * workers);
  if (m * w->n * w->k < ALONE) alone(panels_of_bands, &t, items, items);
  else share_out(panels_of_bands, &t, items, each < 1 ? 1 : each > 4 ? 4 : each);
}
