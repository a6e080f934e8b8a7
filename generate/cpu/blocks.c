// A step of GPT-2 in one call, from token ids to the normed rows that the head takes: embedding, layer norm, attention
// and linear layers, without a hundred returns to Python. The linear and attention kernels are those of packed_linear.c
// and paged_attention.c, passed by address; the rest is here. bfloat16 in and out, float32 inside.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "team.h"

enum { LANES = 16, FEW = 8 };  // FEW rows are not worth another thread

static inline float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

static inline bf16 narrow(float f) {  // to the nearest, ties to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &f, 4);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return f == f ? (bf16)rounded : (bf16)(bits >> 16 | 0x40);
}

static float total(const float *lanes) {
  float sum = 0;
  for (int j = 0; j < LANES; j++) sum += lanes[j];
  return sum;
}

static void norm_row(const bf16 *x, const float *weight, bf16 *y, int64_t n, float eps) {
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
  const bf16 *x;
  const float *weight;
  const int64_t *rows;  // of x, null for all in their order
  bf16 *y;
  int64_t n;
  float eps;
} Norm;

static void norm_rows(void *job, int64_t first, int64_t last, int worker) {
  const Norm *t = job;
  for (int64_t r = first; r < last; r++)
    norm_row(t->x + (t->rows ? t->rows[r] : r) * t->n, t->weight, t->y + r * t->n, t->n, t->eps);
}

// y [m, n] from x [any, n], weight [2, n]: weight and bias. Each row is computed by itself.
static void layer_norm(const bf16 *x, const float *weight, const int64_t *rows, bf16 *y, int64_t m, int64_t n,
                       float eps) {
  Norm t = {x, weight, rows, y, n, eps};
  share_out(norm_rows, &t, m, FEW);
}

static void embed(const Model *model, const int64_t *ids, const int64_t *positions, bf16 *x, int64_t m) {
  for (int64_t r = 0, c = model->width; r < m; r++, x += c) {
    const bf16 *token = model->wte + ids[r] * c, *position = model->wpe + positions[r] * c;
    for (int64_t i = 0; i < c; i++) x[i] = narrow(widen(token[i]) + widen(position[i]));
  }
}

int run_blocks(const Model *model, const Block *blocks, int n_blocks, const int64_t *ids, const int64_t *positions,
               int64_t m, const int64_t *sample_rows, int64_t n_samples, bf16 *out, bf16 *work,
               const int32_t *cu_seqlens, const int32_t *context_lens, const int32_t *block_tables, int n,
               int max_pages) {
  int64_t c = model->width;
  bf16 *x = work, *normed = x + m * c, *qkv = normed + m * c, *inner = qkv;  // qkv is read before inner is written
  embed(model, ids, positions, x, m);
  for (const Block *b = blocks; b < blocks + n_blocks; b++) {
    const bf16 *after = b + 1 < blocks + n_blocks ? b[1].c_attn.packed : 0;
    layer_norm(x, b->ln_1, 0, normed, m, c, b->eps);
    model->linear(normed, b->c_attn.packed, b->c_attn.bias, 0, qkv, m, 3 * c, c, PLAIN, b->attn_proj.packed, c, c);
    int code = model->attention(qkv, b->keys, b->values, normed, cu_seqlens, context_lens, block_tables, n, (int)m,
                                model->heads, model->heads, model->head_size, model->page_size, max_pages, model->pages, b->scale);
    if (code != OK) return code;
    model->linear(normed, b->attn_proj.packed, b->attn_proj.bias, x, x, m, c, c, PLAIN, b->c_fc.packed, model->inner,
                  c);
    layer_norm(x, b->ln_2, 0, normed, m, c, b->eps);
    model->linear(normed, b->c_fc.packed, b->c_fc.bias, 0, inner, m, model->inner, c, GELU_TANH, b->mlp_proj.packed, c,
                  model->inner);
    model->linear(inner, b->mlp_proj.packed, b->mlp_proj.bias, x, x, m, c, model->inner, PLAIN, after, 3 * c, c);
  }
  layer_norm(x, model->ln_f, sample_rows, out, n_samples, c, model->eps);
  return OK;
}
