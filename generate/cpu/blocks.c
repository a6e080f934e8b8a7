// A step of a transformer in one call, from token ids to the normed rows that the head takes: embedding, norms,
// rotation of queries and keys, attention and linear layers, without a hundred returns to Python. The linear and
// attention kernels are those of packed_linear.c and paged_attention.c, passed by address; the rest is here. bfloat16
// in and out, float32 inside.
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

static void layer_norm(const bf16 *x, const float *weight, bf16 *y, int64_t n, float eps) {
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

// As rms_norm() in generate/rotary.py: rounded to bfloat16 before it is multiplied by the weight. y may be x.
static void rms_norm(const bf16 *x, const float *weight, bf16 *y, int64_t n, float eps) {
  float square[LANES] = {0};
  int64_t whole = n / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES)
    for (int j = 0; j < LANES; j++) square[j] += widen(x[i + j]) * widen(x[i + j]);
  for (int64_t i = whole; i < n; i++) square[0] += widen(x[i]) * widen(x[i]);
  float factor = 1 / sqrtf(total(square) / n + eps);
  for (int64_t i = 0; i < n; i++) y[i] = narrow(widen(narrow(widen(x[i]) * factor)) * weight[i]);
}

typedef struct {
  const Model *model;
  const bf16 *x;
  const float *weight;
  const int64_t *rows;  // of x, null for all in their order
  bf16 *y;
  bf16 *sum;            // to which y is added, or null
} Norm;

static void norm_some(void *job, int64_t first, int64_t last, int worker) {
  const Norm *t = job;
  int64_t n = t->model->width;
  for (int64_t r = first; r < last; r++) {
    bf16 *y = t->y + r * n;
    (t->model->rms ? rms_norm : layer_norm)(t->x + (t->rows ? t->rows[r] : r) * n, t->weight, y, n, t->model->eps);
    for (int64_t i = 0; t->sum && i < n; i++) t->sum[r * n + i] = narrow(widen(t->sum[r * n + i]) + widen(y[i]));
  }
}

// y [m, C] from x [any, C]. Each row is computed by itself.
static void norm(const Model *model, const bf16 *x, const float *weight, const int64_t *rows, bf16 *y, int64_t m) {
  Norm t = {model, x, weight, rows, y, 0};
  share_out(norm_some, &t, m, FEW);
}

// Adds the norm of x [m, C], which is lost, to sum [m, C].
static void add_norm(const Model *model, bf16 *x, const float *weight, bf16 *sum, int64_t m) {
  Norm t = {model, x, weight, 0, x, sum};
  share_out(norm_some, &t, m, FEW);
}

typedef struct {
  const Model *model;
  const Block *block;  // not of the embedding
  const int64_t *ids, *positions;
  bf16 *x;
} Tokens;

static void embed_some(void *job, int64_t first, int64_t last, int worker) {
  const Tokens *t = job;
  const Model *model = t->model;
  for (int64_t r = first, c = model->width; r < last; r++) {
    const bf16 *token = model->embedding + t->ids[r] * c;
    bf16 *x = t->x + r * c;
    if (!model->positions) {
      memcpy(x, token, c * sizeof *x);
      continue;
    }
    const bf16 *position = model->positions + t->positions[r] * c;
    for (int64_t i = 0; i < c; i++) x[i] = narrow(widen(token[i]) + widen(position[i]));
  }
}

// As rotate() in generate/rotary.py: dimension i of a head is turned with dimension i + D/2.
static void rotate(bf16 *x, const float *restrict cosine, const float *restrict sine, int half) {
  bf16 *restrict first = x, *restrict second = x + half;
  for (int i = 0; i < half; i++) {
    float a = widen(first[i]), b = widen(second[i]);
    first[i] = narrow(a * cosine[i] - b * sine[i]);
    second[i] = narrow(b * cosine[i] + a * sine[i]);
  }
}

// The queries and keys of some rows of qkv.
static void rotate_some(void *job, int64_t first, int64_t last, int worker) {
  const Tokens *t = job;
  const Model *model = t->model;
  int D = model->head_size, heads = model->heads, keys = heads + model->kv_heads;
  for (int64_t r = first; r < last; r++) {
    const float *cosine = model->rotation + t->positions[r] * D, *sine = cosine + D / 2;
    bf16 *x = t->x + r * (keys + model->kv_heads) * D;
    if (model->whole_qk_norm) {
      rms_norm(x, t->block->q_norm, x, (int64_t)heads * D, model->eps);
      rms_norm(x + heads * D, t->block->k_norm, x + heads * D, (int64_t)(keys - heads) * D, model->eps);
    }
    for (int h = 0; h < keys; h++, x += D) {
      const float *weight = model->whole_qk_norm ? 0 : h < heads ? t->block->q_norm : t->block->k_norm;
      if (weight) rms_norm(x, weight, x, D, model->eps);
      rotate(x, cosine, sine, D / 2);
    }
  }
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// One of a block's four linear layers, with what the adapters of some rows add to it. place: its number in the model.
static void product(const Model *model, const Adapters *adapters, int64_t place, const Linear *w, const bf16 *x,
                    const bf16 *residual, bf16 *out, int64_t m, int mode, const Linear *next) {
  if (adapters && model->low_rank(adapters, place, x, w->k, w->n, 0)) {
    const Extra extra = {adapters->sums, adapters->of_row};
    model->linear(w, x, residual, out, m, mode, next, &extra);
  } else {
    model->linear(w, x, residual, out, m, mode, next, 0);
  }
}

int run_blocks(const Model *model, const Block *blocks, int n_blocks, const int64_t *ids, const int64_t *positions,
               int64_t m, const int64_t *sample_rows, int64_t n_samples, bf16 *out, bf16 *work,
               const int32_t *cu_seqlens, const int32_t *context_lens, const int32_t *block_tables, int n,
               int max_pages, const Adapters *adapters) {
  int64_t c = model->width, attended = (int64_t)model->heads * model->head_size;
  // added: the residual with attention, apart from the one without where the MLP still takes this.
  bf16 *x = work, *added = model->parallel ? x + m * c : x;
  bf16 *normed = added + m * c, *qkv = normed + m * larger(c, attended);
  bf16 *mlp = qkv;  // qkv is read before the MLP is written
  Tokens tokens = {model, 0, ids, positions, x};
  share_out(embed_some, &tokens, m, FEW);
  if (model->embedding_norm) norm(model, x, model->embedding_norm, 0, x, m);
  tokens.x = qkv;
  for (const Block *b = blocks; b < blocks + n_blocks; b++) {
    const int64_t place = 4 * (b - blocks);
    const Linear *after = b + 1 < blocks + n_blocks ? &b[1].qkv : 0;
    const bf16 *taken = model->norm_after ? x : normed;
    if (!model->norm_after) norm(model, x, b->norm_1, 0, normed, m);
    product(model, adapters, place, &b->qkv, taken, 0, qkv, m, PLAIN, &b->attn_proj);
    tokens.block = b;
    if (b->turns) share_out(rotate_some, &tokens, m, FEW);
    int code = model->attention(qkv, b->keys, b->values, normed, cu_seqlens, context_lens, block_tables, n, (int)m,
                                model->heads, model->kv_heads, model->head_size, model->page_size, max_pages,
                                model->pages, b->scale, b->window, 0, b->alibi);
    if (code != OK) return code;
    if (model->norm_after) {
      product(model, adapters, place + 1, &b->attn_proj, normed, 0, mlp, m, PLAIN, &b->fc);
      add_norm(model, mlp, b->norm_1, x, m);
    } else {
      product(model, adapters, place + 1, &b->attn_proj, normed, x, added, m, PLAIN, &b->fc);
      norm(model, x, b->norm_2, 0, normed, m);
    }
    product(model, adapters, place + 2, &b->fc, taken, 0, mlp, m, model->mlp_mode, &b->mlp_proj);
    if (model->norm_after) {
      product(model, adapters, place + 3, &b->mlp_proj, mlp, 0, normed, m, PLAIN, after);
      add_norm(model, normed, b->norm_2, x, m);
    } else {
      product(model, adapters, place + 3, &b->mlp_proj, mlp, added, x, m, PLAIN, after);
    }
  }
  norm(model, x, model->norm, sample_rows, out, n_samples);
  return OK;
}
