// What linear layers of every weight format share: a product's task, and what becomes of a panel's sums: bias,
// activation, residual and rounding. A panel is the weight's rows for 64 outputs.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "team.h"

enum { PANEL = 64 };

typedef struct {
  const Linear *w;
  const bf16 *x, *residual;
  void *out;
  int64_t m, n, k;
  int mode;
  int64_t panels, band;  // of rows
} Task;

// Multiplies rows first up to last by panel p, while `bytes` from `next` on, the weight that is read next, are fetched.
typedef void PanelProduct(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes);

// The row of a weight [n, k] that is output `at` of its panels, or n where there is none.
static int64_t packed_row(int64_t at, int64_t n, int gated) {
  if (!gated) return at < n ? at : n;
  int64_t inner = n / 2, row = at / 32 * 16 + at % 16;
  return row >= inner ? n : at / 16 % 2 ? inner + row : row;
}

#ifdef __AVX512BF16__
#include <immintrin.h>

static inline __m512 widen(const bf16 *p, __mmask16 m) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}

// e^x to 2 units in the last place: 2^n times a polynomial on [-ln2/2, ln2/2]. NaN stays NaN.
static inline __m512 exp16(__m512 x) {
  __m512 lo = _mm512_set1_ps(-87.f), hi = _mm512_set1_ps(88.f);
  __m512 c = _mm512_max_ps(lo, _mm512_min_ps(hi, x));  // min and max return their second operand for a NaN
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(c, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), c);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.f)));
  return _mm512_scalef_ps(p, n);
}

// x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), which is GELU's tanh form.
static inline __m512 gelu16(__m512 x) {
  __m512 x2 = _mm512_mul_ps(x, x);
  __m512 u = _mm512_mul_ps(x, _mm512_fmadd_ps(x2, _mm512_set1_ps(0.0713548162726f), _mm512_set1_ps(1.5957691216057f)));
  __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), u));
  return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1.f)));
}

// x sigmoid(x)
static inline __m512 silu16(__m512 x) {
  __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1.f)));
}

static inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
}

// 16 sums to outputs col and following of a row.
static inline __attribute__((always_inline)) void put(const Task *t, int64_t row, int64_t col, __m512 sum) {
  int64_t at = row * t->n + col;
  __mmask16 mask = first_lanes(t->n - col);
  __m512 y = t->w->bias ? _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, t->w->bias + col)) : sum;
  if (t->mode == FLOAT32) {
    _mm512_mask_storeu_ps((float *)t->out + at, mask, y);
    return;
  }
  if (t->mode == GELU_TANH) y = gelu16(y);
  if (t->residual) y = _mm512_add_ps(y, widen(t->residual + at, mask));
  _mm256_mask_storeu_epi16((bf16 *)t->out + at, mask, (__m256i)_mm512_cvtneps_pbh(y));
}

// 16 sums of gate and of up make products col and following of a row.
static inline __attribute__((always_inline)) void put_gated(const Task *t, int64_t row, int64_t col, __m512 gate,
                                                            __m512 up) {
  int64_t inner = t->n / 2;
  __mmask16 mask = first_lanes(inner - col);
  if (t->w->bias) {
    gate = _mm512_add_ps(gate, _mm512_maskz_loadu_ps(mask, t->w->bias + col));
    up = _mm512_add_ps(up, _mm512_maskz_loadu_ps(mask, t->w->bias + inner + col));
  }
  __m256i y = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(silu16(gate), up));
  _mm256_mask_storeu_epi16((bf16 *)t->out + row * inner + col, mask, y);
}

// The sums of panel p for a row.
static inline __attribute__((always_inline)) void put_panel(const Task *t, int64_t row, int64_t p, __m512 s0, __m512 s1,
                                                            __m512 s2, __m512 s3) {
  if (t->mode == SWIGLU) {
    put_gated(t, row, p * PANEL / 2, s0, s1);
    put_gated(t, row, p * PANEL / 2 + 16, s2, s3);
    return;
  }
  put(t, row, p * PANEL, s0);
  put(t, row, p * PANEL + 16, s1);
  put(t, row, p * PANEL + 32, s2);
  put(t, row, p * PANEL + 48, s3);
}

static inline const char *fetch(const char *from, int lines) {
  for (int l = 0; l < lines; l++) _mm_prefetch(from + 64 * l, _MM_HINT_T1);
  return from + 64 * lines;
}
#endif
