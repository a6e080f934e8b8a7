// Attention over KV pages: decode rows and prefill chunks of one step, ragged, no mask, no padding.
//
// By hand (generate/cpu/kernels.py does the same at the first start):
//   flags="-std=gnu11 -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp-simd -fPIC"
//   cc $flags -c paged_attention.c -o paged_attention.o
//   cc -shared paged_attention.o -o paged_attention.so -lm
// on x86 with -mprefer-vector-width=512, on arm64 with -mcpu=native in place of -march=native.
// Without -ffast-math, since a NaN must stay a NaN. Nothing below needs it: no loop that must become vector code is a
// reduction.
//
// The pools are [pages, H, P, D], but the order of values inside one (page, head) tile is this file's own:
//   keys    [P/16][D][16]    16 keys are the lanes of a vector: no horizontal sum in a score
//   values  [P][D]
// and for bfloat16 at D = 64 on AVX-512-BF16, whose instruction multiplies and adds pairs:
//   keys    [P/16][32][16][2]
//   values  [P/2][64][2]
// Either way 16 keys (a block) are one contiguous run of 16 * D values in both pools.
//
// A token's sums have one order, whichever tokens are computed beside it: a score adds d = 0, 1, ...; the maximum has no
// order; weights are added lane by lane, block after block; an output adds keys 0, 1, ... A token of a chunk and the
// same token decoded alone therefore agree to the bit; only the number of parallel chains differs. Keys behind a
// token's position have weight 0 in its row. Values behind the last position of a block of queries are never
// multiplied, so stale pages may hold any bits.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "kernels.h"
#include "team.h"

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// A vector as wide as the machine's registers; a group of queries and of blocks that fits its registers.
#if defined(__AVX512F__)
#define LANES 16
#define QUERIES 8  // of a chunk that share each load of a key
#define GROUP 2    // blocks of keys scored together for QUERIES queries
#define COLUMNS 4  // vectors of a value row weighed together for HALF queries
#elif defined(__AVX__)
#define LANES 8
#define QUERIES 4
#define GROUP 1
#define COLUMNS 2
#else
#define LANES 4
#define QUERIES 4
#define GROUP 1
#define COLUMNS 4
#endif
#define BLOCK PAGE_MULTIPLE  // keys
#define PARTS (BLOCK / LANES)  // vectors of a block's scores
#define HALF 4               // queries weighed together: their sums fill the registers
#define AHEAD 4              // blocks scored together for one query
#define APPENDED 4           // (sequence, head)s of decode rows whose new keys are written before they are read
#define FAR 4                // blocks that are prefetched ahead of their use by one query
#define ALONE (1 << 18)      // bytes of keys and values below which waking other threads costs more than it saves

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));

typedef struct {
  const char *qkv;  // [M, 3, H, D]
  char *keys, *values, *out;
  const int32_t *cu_seqlens, *context_lens, *block_tables;
  int n, M, H, D, P, max_pages, pages;
  float scale;
  long block, tile, stride;  // bytes of 16 keys, bytes of a (page, head), floats of a row of scores
  int half;                  // bfloat16, else float32
  int *items;                // [n + 1]: where each sequence's (head, block of queries) begin
  float *scratch;            // scores, stride * QUERIES for each worker
} Call;

// ---------------------------------------------------------------------------------------------- elements

INLINE float widen(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

INLINE uint16_t narrow(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (f != f) return (uint16_t)(bits >> 16 | 0x40);  // rounding up could make a NaN an infinity
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// a * b + c, rounded once where vectors do that too: left to itself the compiler fuses some scalar loops and not
// others.
INLINE float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

INLINE float load1(const char *p, long i, int half) {
  if (half) return widen(((const uint16_t *)p)[i]);
  return ((const float *)p)[i];
}

INLINE vec load(const char *p, long i, int half) {
  if (half) {
    hvec h;
    memcpy(&h, p + 2 * i, sizeof h);
    return (vec)(__builtin_convertvector(h, uvec) << 16);
  }
  vec v;
  memcpy(&v, p + 4 * i, sizeof v);
  return v;
}

// 16 keys or values of a sequence: block number `b` of head `h`, where `row` is the sequence's page table.
INLINE char *block_at(const Call *c, char *pool, const int32_t *row, int h, int b) {
  unsigned per_page = (unsigned)c->P / BLOCK, page = (unsigned)b / per_page, rest = (unsigned)b % per_page;
  return pool + ((long)row[page] * c->H + h) * c->tile + rest * c->block;
}

// What a decode row reads next: its key blocks, then its value blocks, then the next head's keys.
INLINE const char *stream_at(const Call *c, const int32_t *row, int h, int blocks, int s) {
  if (s < blocks) return block_at(c, c->keys, row, h, s);
  if (s < 2 * blocks) return block_at(c, c->values, row, h, s - blocks);
  s -= 2 * blocks;
  return block_at(c, c->keys, row, h + 1 < c->H ? h + 1 : h, s < blocks ? s : blocks - 1);
}

// ------------------------------------------------------------------------------------- any D, any machine

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

// Turn n scores into weights in place, zero from n to `end` (a multiple of 16), and return their sum.
INLINE float softmax(float *s, int n, int end, float scale) {
  float m = -INFINITY;
#pragma omp simd reduction(max : m)
  for (int t = 0; t < n; t++) m = s[t] > m ? s[t] : m;
  float c = scale * 1.44269504f, mc = m * c;
#pragma omp simd
  for (int t = 0; t < n; t++) s[t] = exp2_of(s[t] * c - mc);
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
                  int half, int nq, int nk) {
  vec acc[QUERIES][AHEAD * PARTS];
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < nk * PARTS; j++) acc[i][j] = (vec){0};
  }
  for (int d = 0; d < D; d++) {
    vec k[AHEAD * PARTS];
    UNROLL for (int j = 0; j < nk * PARTS; j++) k[j] = load(key[j / PARTS], d * BLOCK + j % PARTS * LANES, half);
    if (ahead) {
      UNROLL for (int j = 0; j < nk; j++) __builtin_prefetch(ahead[j] + d * BLOCK * (half ? 2 : 4));
    }
    UNROLL for (int i = 0; i < nq; i++) {
      UNROLL for (int j = 0; j < nk * PARTS; j++) acc[i][j] += k[j] * q[d * nq + i];
    }
  }
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < nk * PARTS; j++) memcpy(scores + i * stride + j * LANES, &acc[i][j], sizeof(vec));
  }
}

// Columns d0 .. d0 + nc * LANES of the outputs of nq queries: o[i] = sum over n keys of w[i][t] * value[t].
INLINE void weigh_columns(const Call *c, const int32_t *row, int h, const float *w, int n, float *o, int d0, int half,
                          int nq, int nc) {
  int blocks = (n + BLOCK - 1) / BLOCK, bytes = half ? 2 : 4;
  vec acc[HALF][4];
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < nc; j++) acc[i][j] = (vec){0};
  }
  for (int b = 0; b < blocks; b++) {
    const char *value = block_at(c, c->values, row, h, b);
    const char *ahead = nq == 1 ? stream_at(c, row, h, blocks, blocks + b + FAR) : value;
    int end = n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK;
    for (int t = 0; t < end; t++) {
      vec v[4];
      UNROLL for (int j = 0; j < nc; j++) {
        v[j] = load(value, (long)t * c->D + d0 + j * LANES, half);
        if (nq == 1) __builtin_prefetch(ahead + ((long)t * c->D + d0 + j * LANES) * bytes);
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

INLINE void weigh(const Call *c, const int32_t *row, int h, const float *w, int n, float *o, int half, int nq) {
  int d = 0, wide = nq == 1 ? 4 : COLUMNS;
  for (; d + wide * LANES <= c->D; d += wide * LANES) weigh_columns(c, row, h, w, n, o, d, half, nq, wide);
  for (; d + LANES <= c->D; d += LANES) weigh_columns(c, row, h, w, n, o, d, half, nq, 1);
  for (; d < c->D; d++) {  // a head narrower than a vector, or its remainder
    float acc[HALF] = {0};
    for (int b = 0; b * BLOCK < n; b++) {
      const char *value = block_at(c, c->values, row, h, b);
      for (int t = 0; t < BLOCK && b * BLOCK + t < n; t++) {
        float v = load1(value, (long)t * c->D + d, half);
        UNROLL for (int i = 0; i < nq; i++) acc[i] = fused(v, w[i * c->stride + b * BLOCK + t], acc[i]);
      }
    }
    for (int i = 0; i < nq; i++) o[i * MAX_HEAD_SIZE + d] = acc[i];
  }
}

INLINE void append(const Call *c, const int32_t *row, int h, int first, int position, int count, int half) {
  long C = (long)c->H * c->D;
  for (int r = 0; r < count; r++) {
    int lane = (position + r) % BLOCK, b = (position + r) / BLOCK;
    const char *new = c->qkv + ((long)(first + r) * 3 * C + C + (long)h * c->D) * (half ? 2 : 4);
    char *key = block_at(c, c->keys, row, h, b), *value = block_at(c, c->values, row, h, b);
    for (int d = 0; d < c->D; d++) {
      if (half) ((uint16_t *)key)[d * BLOCK + lane] = ((const uint16_t *)new)[d];
      else ((float *)key)[d * BLOCK + lane] = ((const float *)new)[d];
    }
    long bytes = (long)c->D * (half ? 2 : 4);
    memcpy(value + lane * bytes, new + C * (half ? 2 : 4), bytes);
  }
}

// Attention of `count` <= nq queries from packed row `first` on, the first of them at `position`.
INLINE void attend(const Call *c, const int32_t *row, int h, int first, int position, int count, float *scores,
                   int half, int nq) {
  int D = c->D, n = position + count, blocks = (n + BLOCK - 1) / BLOCK, nk = nq == 1 ? AHEAD / PARTS : GROUP;
  long C = (long)c->H * D;
  if (nk < 1) nk = 1;
  float q[MAX_HEAD_SIZE * QUERIES] __attribute__((aligned(64)));
  for (int i = 0; i < nq; i++) {  // queries behind `count` repeat the last one and are not stored
    const char *from = c->qkv + ((first + (i < count ? i : count - 1)) * 3 * C + (long)h * D) * (half ? 2 : 4);
    for (int d = 0; d < D; d++) q[d * nq + i] = load1(from, d, half);
  }
  for (int b = 0; b < blocks; b += nk) {
    const char *key[AHEAD], *ahead[AHEAD];
    UNROLL for (int j = 0; j < nk; j++) {  // entries behind the last block repeat it: no memory is read for them
      key[j] = block_at(c, c->keys, row, h, b + j < blocks ? b + j : blocks - 1);
      if (nq == 1) ahead[j] = stream_at(c, row, h, blocks, b + j + FAR);
    }
    score(q, key, nq == 1 ? ahead : 0, scores + b * BLOCK, c->stride, D, half, nq, nk);
  }
  float sums[QUERIES], o[HALF * MAX_HEAD_SIZE];
  for (int i = 0; i < count; i++) {
    int own = position + i + 1;
    sums[i] = softmax(scores + i * c->stride, own, blocks * BLOCK, c->scale);
  }
  for (int i0 = 0; i0 < count; i0 += HALF) {
    if (nq == 1) weigh(c, row, h, scores, n, o, half, 1);
    else weigh(c, row, h, scores + i0 * c->stride, n, o, half, HALF);
    for (int i = i0; i < count && i < i0 + HALF; i++) {
      float inverse = 1.f / sums[i];
      const float *from = o + (i - i0) * MAX_HEAD_SIZE;
      char *to = c->out + ((long)(first + i) * C + (long)h * D) * (half ? 2 : 4);
      for (int d = 0; d < D; d++) {
        if (half) ((uint16_t *)to)[d] = narrow(from[d] * inverse);
        else ((float *)to)[d] = from[d] * inverse;
      }
    }
  }
}

// --------------------------------------------------------------- bfloat16, D = 64, on AVX-512 with BF16

#ifdef __AVX512BF16__
INLINE __m512bh pairs_at(const char *p) { return (__m512bh)_mm512_loadu_si512(p); }
INLINE __m512bh pair_of(uint32_t x) { return (__m512bh)_mm512_set1_epi32((int)x); }

// As softmax(), but the weights become bfloat16 in place, and it is the rounded ones that are summed.
INLINE float softmax64(float *s, int n, int end, float scale) {
  int whole = n / 16 * 16;
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
    __m256i w = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_scalef_ps(own, p, whole_part));
    _mm256_storeu_si256((__m256i *)((uint16_t *)s + t), w);
    sum = _mm512_add_ps(sum, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(w), 16));
  }
  return _mm512_reduce_add_ps(sum);
}

INLINE void score64(const uint32_t *q, const char *const *key, const char *const *ahead, float *scores, long stride,
                    int nq, int nk) {
  __m512 acc[QUERIES][AHEAD];
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < nk; j++) acc[i][j] = _mm512_setzero_ps();
  }
  for (int d = 0; d < 32; d++) {
    __m512bh k[AHEAD];
    UNROLL for (int j = 0; j < nk; j++) {
      k[j] = pairs_at(key[j] + d * 64);
      if (ahead) __builtin_prefetch(ahead[j] + d * 64);
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

// acc[i] = sum over n keys of w[i][t] * value[t]; w holds bfloat16 pairs, `stride` 32-bit words a query.
INLINE void weigh64(const Call *c, const int32_t *row, int h, const uint32_t *w, long stride, int n,
                    __m512 acc[HALF][4], int nq) {
  int blocks = (n + BLOCK - 1) / BLOCK;
  __m512i all = _mm512_set1_epi32(-1);
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < 4; j++) acc[i][j] = _mm512_setzero_ps();
  }
  for (int b = 0; b < blocks; b++) {
    const char *value = block_at(c, c->values, row, h, b);
    const char *ahead = nq == 1 ? stream_at(c, row, h, blocks, blocks + b + FAR) : value;
    int pairs = n - b * BLOCK < BLOCK ? (n - b * BLOCK) / 2 : BLOCK / 2;
    for (int t = 0; t < pairs; t++) {
      if (nq == 1) {
        UNROLL for (int j = 0; j < 4; j++) __builtin_prefetch(ahead + t * 256 + j * 64);
      }
      weigh_pair(acc, value + t * 256, all, w + b * 8 + t, stride, nq);
    }
  }
  if (n % 2) {  // the pair's second half may be stale, and 0 * NaN is NaN
    const char *value = block_at(c, c->values, row, h, blocks - 1) + (n - 1) % BLOCK / 2 * 256;
    weigh_pair(acc, value, _mm512_set1_epi32(0xffff), w + n / 2, stride, nq);
  }
}

INLINE void append64(const Call *c, const int32_t *row, int h, int first, int position, int count) {
  long C = (long)c->H * 64;
  for (int r = 0; r < count; r++) {
    int lane = (position + r) % BLOCK, b = (position + r) / BLOCK;
    const uint16_t *new = (const uint16_t *)c->qkv + (long)(first + r) * 3 * C + C + h * 64;
    uint32_t *key = (uint32_t *)block_at(c, c->keys, row, h, b);
    uint32_t *value = (uint32_t *)block_at(c, c->values, row, h, b) + lane / 2 * 64;
    for (int d = 0; d < 32; d++) memcpy(key + d * BLOCK + lane, new + 2 * d, 4);
    new += C;
    for (int d = 0; d < 64; d++)
      value[d] = lane % 2 ? (value[d] & 0xffff) | (uint32_t)new[d] << 16 : (value[d] & 0xffff0000) | new[d];
  }
}

INLINE void attend64(const Call *c, const int32_t *row, int h, int first, int position, int count, float *scores,
                     int nq) {
  int n = position + count, blocks = (n + BLOCK - 1) / BLOCK, nk = nq == 1 ? AHEAD : GROUP;
  long C = (long)c->H * 64;
  uint32_t q[32 * QUERIES] __attribute__((aligned(64)));
  for (int i = 0; i < nq; i++) {  // queries behind `count` repeat the last one and are not stored
    const uint16_t *from = (const uint16_t *)c->qkv + (first + (i < count ? i : count - 1)) * 3 * C + h * 64;
    for (int d = 0; d < 32; d++) memcpy(q + d * nq + i, from + 2 * d, 4);
  }
  for (int b = 0; b < blocks; b += nk) {
    const char *key[AHEAD], *ahead[AHEAD];
    UNROLL for (int j = 0; j < nk; j++) {  // entries behind the last block repeat it: no memory is read for them
      key[j] = block_at(c, c->keys, row, h, b + j < blocks ? b + j : blocks - 1);
      if (nq == 1) ahead[j] = stream_at(c, row, h, blocks, b + j + FAR);
    }
    score64(q, key, nq == 1 ? ahead : 0, scores + b * BLOCK, c->stride, nq, nk);
  }
  float sums[QUERIES];
  for (int i = 0; i < count; i++) {
    int own = position + i + 1;
    sums[i] = softmax64(scores + i * c->stride, own, blocks * BLOCK, c->scale);
  }
  for (int i0 = 0; i0 < count; i0 += HALF) {
    __m512 acc[HALF][4];
    weigh64(c, row, h, (const uint32_t *)(scores + i0 * c->stride), c->stride, n, acc, nq == 1 ? 1 : HALF);
    UNROLL for (int i = 0; i < HALF; i++) {
      if ((nq == 1 && i > 0) || i0 + i >= count) continue;
      __m512 inverse = _mm512_set1_ps(1.f / sums[i0 + i]);
      uint16_t *to = (uint16_t *)c->out + (long)(first + i0 + i) * C + h * 64;
      UNROLL for (int j = 0; j < 4; j += 2)
        _mm512_storeu_si512(to + j * 16, (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(acc[i][j + 1], inverse),
                                                                       _mm512_mul_ps(acc[i][j], inverse)));
    }
  }
}
#endif

// -------------------------------------------------------------------------------------------- the step

// A piece of the step: up to QUERIES queries of one head of one sequence. Pieces are numbered by sequence, then by
// head, then by query.
typedef struct {
  int sequence, rows, head, skip;  // rows: all new tokens of the sequence; skip: those before this piece
} Item;

static Item item_at(const Call *c, const int *items, int number) {
  int low = 0, high = c->n;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (items[middle] <= number) low = middle;
    else high = middle;
  }
  int rows = c->cu_seqlens[low + 1] - c->cu_seqlens[low], pieces = (rows + QUERIES - 1) / QUERIES;
  return (Item){low, rows, (number - items[low]) / pieces, (number - items[low]) % pieces * QUERIES};
}

static Item next_item(const Call *c, Item item) {
  item.skip += QUERIES;
  if (item.skip < item.rows) return item;
  item.skip = 0;
  if (++item.head < c->H) return item;
  item.head = 0;
  if (++item.sequence < c->n) item.rows = c->cu_seqlens[item.sequence + 1] - c->cu_seqlens[item.sequence];
  return item;
}

static void append_any(const Call *c, int half, int i, int h) {
  const int32_t *row = c->block_tables + (long)i * c->max_pages;
  int first = c->cu_seqlens[i], count = c->cu_seqlens[i + 1] - first, position = c->context_lens[i] - count;
#ifdef __AVX512BF16__
  if (half && c->D == 64) {
    append64(c, row, h, first, position, count);
    return;
  }
#endif
  if (half) append(c, row, h, first, position, count, 1);
  else append(c, row, h, first, position, count, 0);
}

static void attend_any(const Call *c, int half, Item item, float *scores) {
  int i = item.sequence, h = item.head, count = item.rows - item.skip;
  const int32_t *row = c->block_tables + (long)i * c->max_pages;
  int first = c->cu_seqlens[i] + item.skip, position = c->context_lens[i] - count;
  if (count > QUERIES) count = QUERIES;
#ifdef __AVX512BF16__
  if (half && c->D == 64) {
    if (count == 1) attend64(c, row, h, first, position, 1, scores, 1);
    else attend64(c, row, h, first, position, count, scores, QUERIES);
    return;
  }
#endif
  if (half && count == 1) attend(c, row, h, first, position, 1, scores, 1, 1);
  else if (half) attend(c, row, h, first, position, count, scores, 1, QUERIES);
  else if (count == 1) attend(c, row, h, first, position, 1, scores, 0, 1);
  else attend(c, row, h, first, position, count, scores, 0, QUERIES);
}

// Refuses rows and pages that would make the loops read or write outside their memory; entries behind a context are
// not read.
static int check(const Call *c, int *longest, double *read) {
  if (c->n < 0 || c->cu_seqlens[0] != 0) return BAD_ROWS;
  for (int i = 0; i < c->n; i++) {
    int count = c->cu_seqlens[i + 1] - c->cu_seqlens[i], length = c->context_lens[i];
    if (count < 1 || length < count || (long)length > (long)c->max_pages * c->P) return BAD_ROWS;
    for (int j = 0; j < (length + c->P - 1) / c->P; j++) {
      int page = c->block_tables[(long)i * c->max_pages + j];
      if (page < 0 || page >= c->pages) return BAD_PAGE;
    }
    if (length > *longest) *longest = length;
    *read += (double)count * length;
  }
  return c->cu_seqlens[c->n] > c->M ? BAD_ROWS : OK;
}

// All blocks of a chunk's queries read its keys, so these are written first.
static void append_chunks(void *job, int64_t from, int64_t to, int worker) {
  Call *c = job;
  for (int a = (int)from; a < to; a++) {
    int i = a / c->H;
    if (c->cu_seqlens[i + 1] - c->cu_seqlens[i] > 1) append_any(c, c->half, i, a % c->H);
  }
}

static void attend_some(void *job, int64_t from, int64_t to, int worker) {
  Call *c = job;
  float *scores = c->scratch + worker * c->stride * QUERIES;
  while (from < to) {
    int64_t until = from + APPENDED < to ? from + APPENDED : to;
    Item first = item_at(c, c->items, (int)from), item = first;
    // Decode rows append here, a few heads before they read: a load waits for an earlier store to the same line until
    // that is in memory, and this store has 32 lines to fetch.
    for (int64_t a = from; a < until; a++, item = next_item(c, item))
      if (item.rows == 1) append_any(c, c->half, item.sequence, item.head);
    item = first;
    for (; from < until; from++, item = next_item(c, item)) attend_any(c, c->half, item, scores);
  }
}

static int step(Call *c) {
  double read = 0;  // keys, once for each query
  int longest = 0, wrong = check(c, &longest, &read), bytes = c->half ? 2 : 4, chunks = 0;
  if (wrong) return wrong;
  team_fn each = read * c->H * c->D * bytes * 2 < ALONE ? alone : share_out;
  c->block = (long)BLOCK * c->D * bytes;
  c->tile = (long)c->P * c->D * bytes;
  c->stride = ((long)longest + 63) / 64 * 64 + 16;  // the 16 keep rows of a power of two out of one cache set
  c->items = malloc(sizeof(int) * ((size_t)c->n + 1));
  size_t room = (size_t)c->stride * QUERIES * sizeof(float);
  if (!c->items || posix_memalign((void **)&c->scratch, 64, room * workers)) {
    free(c->items);
    return NO_MEMORY;
  }
  c->items[0] = 0;
  for (int i = 0; i < c->n; i++) {
    int count = c->cu_seqlens[i + 1] - c->cu_seqlens[i];
    chunks += count > 1;
    c->items[i + 1] = c->items[i] + (count + QUERIES - 1) / QUERIES * c->H;
  }
  int total = c->items[c->n], share = total / (4 * workers);
  if (chunks) each(append_chunks, c, (int64_t)c->n * c->H, 1);
  each(attend_some, c, total, share < 1 ? 1 : share > APPENDED ? APPENDED : share);
  long C = (long)c->H * c->D, used = c->n ? c->cu_seqlens[c->n] : 0;
  memset(c->out + used * C * bytes, 0, (size_t)(c->M - used) * C * bytes);
  free(c->items);
  free(c->scratch);
  return OK;
}

#define ENTRY(NAME, HALF_WIDTH)                                                                                       \
  int NAME(const void *qkv, void *keys, void *values, void *out, const int32_t *cu_seqlens,                           \
           const int32_t *context_lens, const int32_t *block_tables, int n, int M, int H, int D, int P, int max_pages, \
           int pages, float scale) {                                                                                  \
    Call c = {.qkv = qkv, .keys = keys, .values = values, .out = out, .cu_seqlens = cu_seqlens,                       \
              .context_lens = context_lens, .block_tables = block_tables, .n = n, .M = M, .H = H, .D = D, .P = P,     \
              .max_pages = max_pages, .pages = pages, .scale = scale, .half = HALF_WIDTH};                            \
    return step(&c);                                                                                                  \
  }
ENTRY(paged_attention_f32, 0)
ENTRY(paged_attention_bf16, 1)

int paged_attention_has_bf16(void) {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}
