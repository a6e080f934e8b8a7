// Attention for bfloat16 heads of a multiple of 64 values in float32 arithmetic, in the order of sums of AMX's tiles,
// so that a token has the same bits whether tiles or vectors compute it: a part of paged_attention.c.
//
// A tile product adds 32 terms: those of even places in one chain, those of odd places in another, each from 0, and
// then the sum of both to what was there before. Like tiles, the caller must take denormals for zeros
// (_MM_DENORMALS_ZERO_ON). Terms that are 0 may be left out: a chain from 0 never becomes -0 by a normal number, and
// x + 0 is x.
#pragma once
#include <immintrin.h>

#include "attention_bf16.h"

INLINE __m512 even_of(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
INLINE __m512 odd_of(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}

// As score_pairs(), for queries in float32, q is [D][nq].
INLINE void score_fma(const float *q, const char *const *key, const char *const *ahead, float *scores, long stride,
                      int D, int nq, int nk) {
  for (int d0 = 0; d0 < D; d0 += TERMS) {
    __m512 even[QUERIES][AHEAD], odd[QUERIES][AHEAD];
    UNROLL for (int i = 0; i < nq; i++) {
      UNROLL for (int j = 0; j < nk; j++) even[i][j] = odd[i][j] = _mm512_setzero_ps();
    }
    for (int d = d0; d < d0 + TERMS; d += 2) {
      __m512 e[AHEAD], o[AHEAD];
      UNROLL for (int j = 0; j < nk; j++) {
        __m512i pairs = _mm512_loadu_si512(key[j] + d * 32);
        e[j] = even_of(pairs), o[j] = odd_of(pairs);
        if (ahead) prefetch(ahead[j] + d * 32);
      }
      UNROLL for (int i = 0; i < nq; i++) {
        __m512 x = _mm512_set1_ps(q[d * nq + i]), y = _mm512_set1_ps(q[(d + 1) * nq + i]);
        UNROLL for (int j = 0; j < nk; j++) {
          even[i][j] = _mm512_fmadd_ps(e[j], x, even[i][j]);
          odd[i][j] = _mm512_fmadd_ps(o[j], y, odd[i][j]);
        }
      }
    }
    UNROLL for (int i = 0; i < nq; i++) {
      UNROLL for (int j = 0; j < nk; j++) {
        float *to = scores + i * stride + j * 16;
        __m512 before = d0 ? _mm512_loadu_ps(to) : _mm512_setzero_ps();
        _mm512_storeu_ps(to, _mm512_add_ps(before, _mm512_add_ps(even[i][j], odd[i][j])));
      }
    }
  }
}

// As weigh_64(), for nc vectors of columns and weights in float32.
INLINE void weigh_fma(const Call *c, const int32_t *row, int h, const float *w, int n, int D, int d0,
                      __m512 acc[HALF][4], int nq, int nc, int stream) {
  int blocks = (n + BLOCK - 1) / BLOCK;
  long pair = 4L * D;
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < nc; j++) acc[i][j] = _mm512_setzero_ps();
  }
  for (int first = 0; first < n; first += TERMS) {
    __m512 even[HALF][4], odd[HALF][4];
    UNROLL for (int i = 0; i < nq; i++) {
      UNROLL for (int j = 0; j < nc; j++) even[i][j] = odd[i][j] = _mm512_setzero_ps();
    }
    for (int b = first / BLOCK; b < first / BLOCK + TERMS / BLOCK && b < blocks; b++) {
      const char *value = block_at(c, c->values, row, h, b) + 4 * d0;
      const char *ahead = stream ? stream_at(c, row, h, blocks, blocks + b + FAR) + 4 * d0 : value;
      int end = n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK;
      for (int t = 0; t < end; t += 2) {
        // the pair's second half may be stale, and 0 * NaN is NaN
        __m512i keep = _mm512_set1_epi32(t + 1 < end ? -1 : 0xffff);
        const float *weight = w + b * BLOCK + t;
        __m512i v[4];
        UNROLL for (int j = 0; j < nc; j++) {
          v[j] = _mm512_and_si512(keep, _mm512_loadu_si512(value + t / 2 * pair + j * 64));
          if (stream) prefetch(ahead + t / 2 * pair + j * 64);
        }
        UNROLL for (int i = 0; i < nq; i++) {
          __m512 x = _mm512_set1_ps(weight[i * c->stride]), y = _mm512_set1_ps(weight[i * c->stride + 1]);
          UNROLL for (int j = 0; j < nc; j++) {
            even[i][j] = _mm512_fmadd_ps(even_of(v[j]), x, even[i][j]);
            odd[i][j] = _mm512_fmadd_ps(odd_of(v[j]), y, odd[i][j]);
          }
        }
      }
    }
    UNROLL for (int i = 0; i < nq; i++) {
      UNROLL for (int j = 0; j < nc; j++) acc[i][j] = _mm512_add_ps(acc[i][j], _mm512_add_ps(even[i][j], odd[i][j]));
    }
  }
}

// As attend().
INLINE void attend_fma(const Call *c, const Queries *t, float *scores, int D, int nq, int stream) {
  const int32_t *row = t->pages;
  int h = t->head, n = t->keys, blocks = (n + BLOCK - 1) / BLOCK, nk = nq == 1 ? AHEAD : nq <= HALF ? 2 : 1;
  int some = nq < HALF ? nq : HALF, nc = some == 1 ? 4 : 2;
  float q[MAX_HEAD_SIZE * QUERIES] __attribute__((aligned(64)));
  for (int i = 0; i < nq; i++) {
    const char *from = query_values(c, t->at[i]);
    for (int d = 0; d < D; d++) q[d * nq + i] = load1(from, d, KV_BF16);
  }
  for (int b = 0; b < blocks; b += nk) {
    const char *key[AHEAD], *ahead[AHEAD];
    UNROLL for (int j = 0; j < nk; j++) {  // entries behind the last block repeat it: no memory is read for them
      key[j] = block_at(c, c->keys, row, h, b + j < blocks ? b + j : blocks - 1);
      if (stream) ahead[j] = stream_at(c, row, h, blocks, b + j + FAR);
    }
    score_fma(q, key, stream ? ahead : 0, scores + b * BLOCK, c->stride, D, nq, nk);
  }
  float sums[QUERIES];
  for (int i = 0; i < t->count; i++)
    sums[i] = softmax_pairs(c, scores + i * c->stride, t->at[i], blocks * BLOCK, 1);
  for (int i0 = 0; i0 < t->count; i0 += HALF) {
    for (int d0 = 0; d0 < D; d0 += 16 * nc) {
      __m512 acc[HALF][4];
      weigh_fma(c, row, h, scores + i0 * c->stride, n, D, d0, acc, some, nc, stream);
      UNROLL for (int i = 0; i < some; i++) {
        if (i0 + i < t->count) put_outputs(c, t->at[i0 + i], d0, acc[i], nc, sums[i0 + i]);
      }
    }
  }
}
