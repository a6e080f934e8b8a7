// Attention for bfloat16 heads of a multiple of 64 values on AVX-512 with BF16: a part of paged_attention.c.
#pragma once
#include <immintrin.h>

#include "attention_call.h"

INLINE __m512bh pairs_at(const char *p) { return (__m512bh)_mm512_loadu_si512(p); }
INLINE __m512bh pair_of(uint32_t x) { return (__m512bh)_mm512_set1_epi32((int)x); }

// As softmax(), but the weights are rounded to bfloat16, in place, or with `wide` as float32; the rounded ones are summed.
APART float softmax_pairs(const Call *call, float *s, Query q, int end, int wide) {
  int n = q.position + 1, whole = n / 16 * 16;
  soften(s, n, call->scale, call->cap);
  float scale = lean(call, q, s, call->scale);
  for (int t = 0; t < q.from; t++) s[t] = -INFINITY;
  __mmask16 tail = (__mmask16)((1u << (n - whole)) - 1);
  __m512 m = _mm512_set1_ps(-INFINITY), c = _mm512_set1_ps(scale * 1.44269504f), sum = _mm512_setzero_ps();
  for (int t = 0; t < whole; t += 16) m = _mm512_max_ps(m, _mm512_loadu_ps(s + t));
  if (tail) m = _mm512_mask_max_ps(m, tail, m, _mm512_loadu_ps(s + whole));
  __m512 mc = _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(m)), c), floor = _mm512_set1_ps(-126.f);
  for (int t = 0; t < end; t += 16) {
    // max(floor, x), not max(x, floor): of a NaN and a number the instruction returns the second
    __m512 x = _mm512_max_ps(floor, _mm512_fmsub_ps(_mm512_loadu_ps(s + t), c, mc));
    __m512 whole_part = _mm512_roundscale_ps(x, 8), f = _mm512_sub_ps(x, whole_part);
    __m512 p = _mm512_set1_ps(9.5701019e-3f);  // degree 4: error 3e-6, far below bfloat16's 2e-3
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5917862e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4024745e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9312181e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.9999926e-1f));
    __mmask16 own = t < whole ? 0xffff : t == whole ? tail : 0;
    if (t < q.from) own &= t + 16 <= q.from ? 0 : (__mmask16)(0xffff << (q.from - t));
    __m256i w = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_scalef_ps(own, p, whole_part));
    __m512 rounded = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(w), 16);
    if (wide) _mm512_storeu_ps(s + t, rounded);
    else _mm256_storeu_si256((__m256i *)((uint16_t *)s + t), w);
    sum = _mm512_add_ps(sum, rounded);
  }
  return _mm512_reduce_add_ps(sum);
}

INLINE void score_pairs(const uint32_t *q, const char *const *key, const char *const *ahead, float *scores,
                        long stride, int pairs, int nq, int nk) {
  __m512 acc[QUERIES][AHEAD];
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < nk; j++) acc[i][j] = _mm512_setzero_ps();
  }
  for (int d = 0; d < pairs; d++) {
    __m512bh k[AHEAD];
    UNROLL for (int j = 0; j < nk; j++) {
      k[j] = pairs_at(key[j] + d * 64);
      if (ahead) prefetch(ahead[j] + d * 64);
    }
    UNROLL for (int i = 0; i < nq; i++) {
      __m512bh x = pair_of(q[d * nq + i]);
      UNROLL for (int j = 0; j < nk; j++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], k[j], x);
    }
  }
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < nk; j++) _mm512_storeu_ps(scores + i * stride + j * 16, acc[i][j]);
  }
}

INLINE void weigh_pair(__m512 acc[HALF][4], const char *value, __m512i keep, const uint32_t *w, long stride, int nq) {
  __m512bh v[4];
  UNROLL for (int j = 0; j < 4; j++) v[j] = (__m512bh)_mm512_and_si512((__m512i)pairs_at(value + j * 64), keep);
  UNROLL for (int i = 0; i < nq; i++) {
    __m512bh x = pair_of(w[i * stride]);
    UNROLL for (int j = 0; j < 4; j++) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], v[j], x);
  }
}

// Columns d0 to d0 + 64: acc[i] = sum over n keys of w[i][t] * value[t]; w holds bfloat16 pairs, `stride` 32-bit words
// a query.
INLINE void weigh_64(const Call *c, const int32_t *row, int h, const uint32_t *w, int n, int D, int d0,
                     __m512 acc[HALF][4], int nq, int stream) {
  int blocks = (n + BLOCK - 1) / BLOCK;
  long pair = 4L * D;
  __m512i all = _mm512_set1_epi32(-1);
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < 4; j++) acc[i][j] = _mm512_setzero_ps();
  }
  for (int b = 0; b < blocks; b++) {
    const char *value = block_at(c, c->values, row, h, b) + 4 * d0;
    const char *ahead = stream ? stream_at(c, row, h, blocks, blocks + b + FAR) + 4 * d0 : value;
    int pairs = n - b * BLOCK < BLOCK ? (n - b * BLOCK) / 2 : BLOCK / 2;
    for (int t = 0; t < pairs; t++) {
      if (stream) {
        UNROLL for (int j = 0; j < 4; j++) prefetch(ahead + t * pair + j * 64);
      }
      weigh_pair(acc, value + t * pair, all, w + b * 8 + t, c->stride, nq);
    }
  }
  if (n % 2) {  // the pair's second half may be stale, and 0 * NaN is NaN
    const char *value = block_at(c, c->values, row, h, blocks - 1) + (n - 1) % BLOCK / 2 * pair + 4 * d0;
    weigh_pair(acc, value, _mm512_set1_epi32(0xffff), w + n / 2, c->stride, nq);
  }
}

// Write outputs d0 to d0 + 16 nc of a query: the sums of its values over the sum of its weights. nc is even.
INLINE void put_outputs(const Call *c, Query q, int d0, const __m512 *acc, int nc, float sum) {
  __m512 inverse = _mm512_set1_ps(1.f / sum);
  uint16_t *to = (uint16_t *)output_of(c, q) + d0;
  UNROLL for (int j = 0; j < nc; j += 2) {
    __m512 low = _mm512_mul_ps(acc[j], inverse), high = _mm512_mul_ps(acc[j + 1], inverse);
    _mm512_storeu_si512(to + j * 16, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

// As append().
INLINE void append_pairs(const Call *c, const int32_t *row, int h, int first, int position, int count) {
  int D = c->D;
  for (int r = 0; r < count; r++) {
    int lane = (position + r) % BLOCK, b = (position + r) / BLOCK;
    const uint16_t *new = (const uint16_t *)new_key(c, first + r, h);
    uint32_t *key = (uint32_t *)block_at(c, c->keys, row, h, b);
    uint32_t *value = (uint32_t *)block_at(c, c->values, row, h, b) + lane / 2 * D;
    for (int d = 0; d < D / 2; d++) memcpy(key + d * BLOCK + lane, new + 2 * d, 4);
    new += c->KV * D;
    for (int d = 0; d < D; d++)
      value[d] = lane % 2 ? (value[d] & 0xffff) | (uint32_t)new[d] << 16 : (value[d] & 0xffff0000) | new[d];
  }
}

// As attend().
INLINE void attend_pairs(const Call *c, const Queries *t, float *scores, int D, int nq, int stream) {
  const int32_t *row = t->pages;
  int h = t->head, n = t->keys, blocks = (n + BLOCK - 1) / BLOCK, nk = nq > HALF ? GROUP : AHEAD;
  uint32_t q[MAX_HEAD_SIZE / 2 * QUERIES] __attribute__((aligned(64)));
  for (int i = 0; i < nq; i++) {
    const char *from = query_values(c, t->at[i]);
    for (int d = 0; d < D / 2; d++) memcpy(q + d * nq + i, from + 4 * d, 4);
  }
  for (int b = 0; b < blocks; b += nk) {
    const char *key[AHEAD], *ahead[AHEAD];
    UNROLL for (int j = 0; j < nk; j++) {  // entries behind the last block repeat it: no memory is read for them
      key[j] = block_at(c, c->keys, row, h, b + j < blocks ? b + j : blocks - 1);
      if (stream) ahead[j] = stream_at(c, row, h, blocks, b + j + FAR);
    }
    score_pairs(q, key, stream ? ahead : 0, scores + b * BLOCK, c->stride, D / 2, nq, nk);
  }
  float sums[QUERIES];
  for (int i = 0; i < t->count; i++)
    sums[i] = softmax_pairs(c, scores + i * c->stride, t->at[i], blocks * BLOCK, 0);
  for (int i0 = 0; i0 < t->count; i0 += HALF) {
    for (int d0 = 0; d0 < D; d0 += 64) {
      __m512 acc[HALF][4];
      weigh_64(c, row, h, (const uint32_t *)(scores + i0 * c->stride), n, D, d0, acc, nq < HALF ? nq : HALF, stream);
      UNROLL for (int i = 0; i < HALF; i++) {
        if (i < nq && i0 + i < t->count) put_outputs(c, t->at[i0 + i], d0, acc[i], 4, sums[i0 + i]);
      }
    }
  }
}
