// Attention for any size of heads on any machine, in the compiler's vectors: a part of paged_attention.c.
#pragma once

#include "attention_call.h"

// 2^x for x <= 0, relative error below 2e-7; NaN stays NaN. Below 2^-126 it is 2^-126, which no sum sees.
INLINE float exp2_of(float x) {
  x = x < -126.f ? -126.f : x;
  float shifted = x + 12582912.f;  // 1.5 * 2^23: the integer nearest to x stands in the low bits
  float f = x - (shifted - 12582912.f);
  uint32_t bits;
  memcpy(&bits, &shifted, 4);
  bits = (bits + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  float p = 1.3276472e-3f;
  p = p * f + 9.6755415e-3f;
  p = p * f + 5.5507133e-2f;
  p = p * f + 2.4022120e-1f;
  p = p * f + 6.9314697e-1f;
  p = p * f + 1.0000000e+0f;
  return p * power;
}

// Turn a query's scores into weights in place, zero for keys that it does not see, up to `end` (a multiple of 16), and
// return their sum.
APART float softmax(const Call *c, float *s, Query q, int end, float scale) {
  int n = q.position + 1;
  float m = -INFINITY;
  soften(s, n, scale, c->cap);
  scale = lean(c, q, s, scale);
#pragma omp simd reduction(max : m)
  for (int t = q.from; t < n; t++) m = s[t] > m ? s[t] : m;
  float by = scale * 1.44269504f, peak = m * by;
#pragma omp simd
  for (int t = 0; t < n; t++) s[t] = exp2_of(s[t] * by - peak);
  for (int t = 0; t < q.from; t++) s[t] = 0;
  for (int t = n; t < end; t++) s[t] = 0;
  vec sum[PARTS] = {{0}};
  for (int t = 0; t < end; t += BLOCK) {
    UNROLL for (int p = 0; p < PARTS; p++) sum[p] += load((const char *)s, t + p * LANES, 0);
  }
  float l = 0;
  for (int p = 0; p < PARTS; p++)
    for (int i = 0; i < LANES; i++) l += sum[p][i];
  return l;
}

// scores[i][16 b + lane] = q[i] . key, for nq queries (q is [D][nq]) and nk blocks of keys.
INLINE void score(const float *q, const char *const *key, const char *const *ahead, float *scores, long stride, int D,
                  int format, int nq, int nk) {
  vec acc[QUERIES][AHEAD * PARTS];
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < nk * PARTS; j++) acc[i][j] = (vec){0};
  }
  for (int d = 0; d < D; d++) {
    vec k[AHEAD * PARTS];
    UNROLL for (int j = 0; j < nk * PARTS; j++) k[j] = load(key[j / PARTS], d * BLOCK + j % PARTS * LANES, format);
    if (ahead && d * BLOCK * width(format) % LINE == 0) {
      UNROLL for (int j = 0; j < nk; j++) prefetch(ahead[j] + d * BLOCK * width(format));
    }
    UNROLL for (int i = 0; i < nq; i++) {
      UNROLL for (int j = 0; j < nk * PARTS; j++) acc[i][j] += k[j] * q[d * nq + i];
    }
  }
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < nk * PARTS; j++) {
      memcpy(scores + i * stride + j * LANES, &acc[i][j], sizeof(vec));
    }
  }
}

// Columns d0 .. d0 + nc * LANES of the outputs of nq queries: o[i] = sum over n keys of w[i][t] * value[t].
INLINE void weigh_columns(const Call *c, const int32_t *row, int h, const float *w, int n, float *o, int d0,
                          int format, int nq, int nc, int stream) {
  int blocks = (n + BLOCK - 1) / BLOCK, bytes = width(format);
  vec acc[HALF][4];
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < nc; j++) acc[i][j] = (vec){0};
  }
  for (int b = 0; b < blocks; b++) {
    const char *value = block_at(c, c->values, row, h, b);
    const char *ahead = stream ? stream_at(c, row, h, blocks, blocks + b + FAR) : value;
    int end = n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK;
    for (int t = 0; t < end; t++) {
      vec v[4];
      UNROLL for (int j = 0; j < nc; j++) {
        v[j] = load(value, (long)t * c->D + d0 + j * LANES, format);
        if (stream && j * LANES * bytes % LINE == 0) prefetch(ahead + ((long)t * c->D + d0 + j * LANES) * bytes);
      }
      UNROLL for (int i = 0; i < nq; i++) {
        UNROLL for (int j = 0; j < nc; j++) acc[i][j] += v[j] * w[i * c->stride + b * BLOCK + t];
      }
    }
  }
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < nc; j++) memcpy(o + i * MAX_HEAD_SIZE + d0 + j * LANES, &acc[i][j], sizeof(vec));
  }
}

// Columns d0 and following of a head that is narrower than a vector, or its remainder.
APART void weigh_rest(const Call *c, const int32_t *row, int h, const float *w, int n, float *o, int d0, int format,
                      int nq) {
  for (int d = d0; d < c->D; d++) {
    float acc[HALF] = {0};
    for (int b = 0; b * BLOCK < n; b++) {
      const char *value = block_at(c, c->values, row, h, b);
      for (int t = 0; t < BLOCK && b * BLOCK + t < n; t++) {
        float v = load1(value, (long)t * c->D + d, format);
        UNROLL for (int i = 0; i < nq; i++) acc[i] = fused_one(v, w[i * c->stride + b * BLOCK + t], acc[i]);
      }
    }
    for (int i = 0; i < nq; i++) o[i * MAX_HEAD_SIZE + d] = acc[i];
  }
}

INLINE void weigh(const Call *c, const int32_t *row, int h, const float *w, int n, float *o, int format, int nq,
                  int stream) {
  int d = 0, wide = nq == 1 ? 4 : COLUMNS;
  for (; d + wide * LANES <= c->D; d += wide * LANES)
    weigh_columns(c, row, h, w, n, o, d, format, nq, wide, stream);
  for (; d + LANES <= c->D; d += LANES) weigh_columns(c, row, h, w, n, o, d, format, nq, 1, stream);
  if (d < c->D) weigh_rest(c, row, h, w, n, o, d, format, nq);
}

// Write the keys and values of `count` tokens from packed row `first` and from `position` on.
INLINE void append(const Call *c, const int32_t *row, int h, int first, int position, int count, int half) {
  for (int r = 0; r < count; r++) {
    int lane = (position + r) % BLOCK, b = (position + r) / BLOCK;
    const char *new = new_key(c, first + r, h);
    char *key = block_at(c, c->keys, row, h, b), *value = block_at(c, c->values, row, h, b);
    for (int d = 0; d < c->D; d++) {
      if (half) ((uint16_t *)key)[d * BLOCK + lane] = ((const uint16_t *)new)[d];
      else ((float *)key)[d * BLOCK + lane] = ((const float *)new)[d];
    }
    long bytes = (long)c->D * (half ? 2 : 4);
    memcpy(value + lane * bytes, new + c->KV * bytes, bytes);
  }
}

// Attention of up to nq queries. `stream`: they are one token's, so that memory limits, and what it will give next is
// prefetched.
INLINE void attend(const Call *c, const Queries *t, float *scores, int format, int nq, int stream) {
  const int32_t *row = t->pages;
  int D = c->D, h = t->head, n = t->keys, blocks = (n + BLOCK - 1) / BLOCK;
  int nk = nq < QUERIES ? AHEAD / PARTS : GROUP;
  if (nk < 1) nk = 1;
  float q[MAX_HEAD_SIZE * QUERIES] __attribute__((aligned(64)));
  for (int i = 0; i < nq; i++) {
    const char *from = query_values(c, t->at[i]);
    for (int d = 0; d < D; d++) q[d * nq + i] = load1(from, d, format);
  }
  for (int b = 0; b < blocks; b += nk) {
    const char *key[AHEAD], *ahead[AHEAD];
    UNROLL for (int j = 0; j < nk; j++) {  // entries behind the last block repeat it: no memory is read for them
      key[j] = block_at(c, c->keys, row, h, b + j < blocks ? b + j : blocks - 1);
      if (stream) ahead[j] = stream_at(c, row, h, blocks, b + j + FAR);
    }
    score(q, key, stream ? ahead : 0, scores + b * BLOCK, c->stride, D, format, nq, nk);
  }
  float sums[QUERIES], o[HALF * MAX_HEAD_SIZE];
  for (int i = 0; i < t->count; i++)
    sums[i] = softmax(c, scores + i * c->stride, t->at[i], blocks * BLOCK, c->scale);
  for (int i0 = 0; i0 < t->count; i0 += HALF) {
    weigh(c, row, h, scores + i0 * c->stride, n, o, format, nq < HALF ? nq : HALF, stream);
    for (int i = i0; i < t->count && i < i0 + HALF; i++) {
      float inverse = 1.f / sums[i];
      const float *from = o + (i - i0) * MAX_HEAD_SIZE;
      char *to = output_of(c, t->at[i]);
      for (int d = 0; d < D; d++) {
        if (format == KV_BF16) ((uint16_t *)to)[d] = narrow(from[d] * inverse);
        else ((float *)to)[d] = from[d] * inverse;
      }
    }
  }
}
