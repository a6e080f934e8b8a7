// A step in one call, from token ids to the normed rows that the head takes: embedding, layer norm, attention and linear
// layers one after the other, without going back to Python some hundred times. The two kernels are those of
// packed_linear.c and paged_attention.c, handed in by address; the rest is here. bfloat16 in and out, float32 within.
//
// By hand: cc -O3 -march=native -fno-math-errno -fno-trapping-math -fPIC -c blocks.c && cc -shared blocks.o -o blocks.so -lm
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "team.h"

typedef uint16_t bf;
typedef void (*linear_fn)(const bf *x, const bf *packed, const float *bias, const bf *residual, void *out, int64_t m,
                          int64_t n, int64_t k, int mode, const bf *next, int64_t next_n, int64_t next_k);
typedef int (*attention_fn)(const void *qkv, void *keys, void *values, void *out, const int32_t *starts,
                            const int32_t *lengths, const int32_t *tables, int n, int M, int H, int D, int P,
                            int max_pages, int pages, float scale);

enum { PLAIN = 0, GELU_TANH = 1, LANES = 16, FEW = 8 };  // FEW rows are not worth another thread

typedef struct {
  const bf *packed;
  const float *bias;
} Linear;

typedef struct {
  const float *ln_1, *ln_2;  // weight [C], then bias [C]
  Linear c_attn, attn_proj, c_fc, mlp_proj;
  bf *keys, *values;
  float scale, eps;
} Block;

typedef struct {
  linear_fn linear;
  attention_fn attention;
  const bf *wte, *wpe;
  const float *ln_f;
  float eps;
  int64_t width, inner;
  int heads, head_size, page_size, pages;
} Model;

static inline float widen(bf x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

static inline bf narrow(float f) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &f, 4);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return f == f ? (bf)rounded : (bf)(bits >> 16 | 0x40);
}

static float total(const float *lanes) {
  float sum = 0;
  for (int j = 0; j < LANES; j++) sum += lanes[j];
  return sum;
}

static void norm_row(const bf *x, const float *weight, bf *y, int64_t n, float eps) {
  const float *bias = weight + n;
  float sum[LANES] = {0}, square[LANES] = {0};
  int64_t whole = n / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES)
    for (int j = 0; j < LANES; j++) sum[j] += widen(x[i + j]);
  for (int64_t i = whole; i < n; i++) sum[0] += widen(x[i]);
  float mean = total(sum) / n;
  for (int64_t i = 0; i < whole; i += LANES)
    for (int j = 0; j < LANES; j++) {
      float d = widen(x[i + j]) - mean;
      square[j] += d * d;
    }
  for (int64_t i = whole; i < n; i++) square[0] += (widen(x[i]) - mean) * (widen(x[i]) - mean);
  float factor = 1 / sqrtf(total(square) / n + eps);
  for (int64_t i = 0; i < n; i++) y[i] = narrow((widen(x[i]) - mean) * factor * weight[i] + bias[i]);
}

typedef struct {
  const bf *x;
  const float *weight;
  const int64_t *rows;  // of x, null for all in their order
  bf *y;
  int64_t n;
  float eps;
} Norm;

static void norm_rows(void *job, int64_t first, int64_t last, int worker) {
  const Norm *t = job;
  for (int64_t r = first; r < last; r++)
    norm_row(t->x + (t->rows ? t->rows[r] : r) * t->n, t->weight, t->y + r * t->n, t->n, t->eps);
}

// y [m, n] from x [any, n], weight [2, n]: weight and bias. Rows are computed each by itself.
static void layer_norm(const bf *x, const float *weight, const int64_t *rows, bf *y, int64_t m, int64_t n, float eps) {
  Norm t = {x, weight, rows, y, n, eps};
  share_out(norm_rows, &t, m, FEW);
}

static void embed(const Model *model, const int64_t *ids, const int64_t *places, bf *x, int64_t m) {
  for (int64_t r = 0, c = model->width; r < m; r++, x += c) {
    const bf *token = model->wte + ids[r] * c, *place = model->wpe + places[r] * c;
    for (int64_t i = 0; i < c; i++) x[i] = narrow(widen(token[i]) + widen(place[i]));
  }
}

// ids, places [m]; due [n_due] rows to be normed into out [n_due, width]. work has m * (2 * width + max(3 * width, inner))
// elements.
// Returns what attention returns when it refuses, with out then of no use, else 0.
int run_blocks(const Model *model, const Block *blocks, int n_blocks, const int64_t *ids, const int64_t *places, int64_t m,
               const int64_t *due, int64_t n_due, bf *out, bf *work, const int32_t *starts, const int32_t *lengths,
               const int32_t *tables, int n, int max_pages) {
  int64_t c = model->width;
  bf *x = work, *normed = x + m * c, *qkv = normed + m * c, *inner = qkv;  // qkv is read before inner is written
  embed(model, ids, places, x, m);
  for (const Block *b = blocks; b < blocks + n_blocks; b++) {
    const bf *after = b + 1 < blocks + n_blocks ? b[1].c_attn.packed : 0;
    layer_norm(x, b->ln_1, 0, normed, m, c, b->eps);
    model->linear(normed, b->c_attn.packed, b->c_attn.bias, 0, qkv, m, 3 * c, c, PLAIN, b->attn_proj.packed, c, c);
    int wrong = model->attention(qkv, b->keys, b->values, normed, starts, lengths, tables, n, (int)m, model->heads,
                                 model->head_size, model->page_size, max_pages, model->pages, b->scale);
    if (wrong) return wrong;
    model->linear(normed, b->attn_proj.packed, b->attn_proj.bias, x, x, m, c, c, PLAIN, b->c_fc.packed, model->inner, c);
    layer_norm(x, b->ln_2, 0, normed, m, c, b->eps);
    model->linear(normed, b->c_fc.packed, b->c_fc.bias, 0, inner, m, model->inner, c, GELU_TANH, b->mlp_proj.packed, c,
                  model->inner);
    model->linear(inner, b->mlp_proj.packed, b->mlp_proj.bias, x, x, m, c, model->inner, PLAIN, after, 3 * c, c);
  }
  layer_norm(x, model->ln_f, due, out, n_due, c, model->eps);
  return 0;
}
