// Vectors as wide as the processor's registers, for code that is written once for all: loads, bfloat16, activations.
// Products that are added are fused by name: left to itself, the compiler fuses some and not others, and a row's bits
// would depend on which copy of a loop computes it.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))  // what all variants share, compiled once: copies take seconds to compile
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 64")  // before registers are assigned: else GCC keeps arrays of sums in memory
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));
typedef int8_t bvec __attribute__((vector_size(LANES)));

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__)) || defined(__aarch64__)
#define HAS_FMA 1
#else
#define HAS_FMA 0
#endif

INLINE vec all_of(float x) { return x - (vec){0}; }

// a * b + c, rounded once where the processor can.
INLINE vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;  // not fused: such a processor has no instruction for it
#endif
}

// The first `count` values from p on, then zeros.
INLINE vec load_floats(const float *p, int64_t count) {
  vec v = {0};
  if (count >= LANES) memcpy(&v, p, sizeof v);
  else if (count > 0) memcpy(&v, p, (size_t)count * sizeof *p);
  return v;
}

INLINE vec load_bf16(const bf16 *p, int64_t count) {
  hvec h = {0};
  if (count >= LANES) memcpy(&h, p, sizeof h);
  else if (count > 0) memcpy(&h, p, (size_t)count * sizeof *p);
  return (vec)(__builtin_convertvector(h, uvec) << 16);
}

INLINE void store_floats(float *p, vec v, int64_t count) {
  if (count >= LANES) memcpy(p, &v, sizeof v);
  else if (count > 0) memcpy(p, &v, (size_t)count * sizeof *p);
}

// Rounded to the nearest, ties to even; NaN stays NaN.
INLINE void store_bf16(bf16 *p, vec v, int64_t count) {
#ifdef __AVX512BF16__
  hvec h = (hvec)_mm512_cvtneps_pbh((__m512)v);
#else
  uvec bits = (uvec)v, nan = (uvec)(v != v), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  hvec h = __builtin_convertvector((rounded & ~nan) | ((bits >> 16 | 0x40) & nan), hvec);
#endif
  if (count >= LANES) memcpy(p, &h, sizeof h);
  else if (count > 0) memcpy(p, &h, (size_t)count * sizeof *p);
}

// The elements of `yes` where `mask` is all ones, else those of `no`.
INLINE vec choose(uvec mask, vec yes, vec no) { return (vec)(((uvec)yes & mask) | ((uvec)no & ~mask)); }

// x within the bounds; NaN stays NaN.
INLINE vec within(vec x, float low, float high) {
#if defined(__AVX512F__)  // min and max return their second operand for a NaN
  return (vec)_mm512_max_ps(_mm512_set1_ps(low), _mm512_min_ps(_mm512_set1_ps(high), (__m512)x));
#elif defined(__AVX2__)
  return (vec)_mm256_max_ps(_mm256_set1_ps(low), _mm256_min_ps(_mm256_set1_ps(high), (__m256)x));
#else
  x = choose((uvec)(x < low), all_of(low), x);
  return choose((uvec)(x > high), all_of(high), x);
#endif
}

// e^x to 2 units in the last place: 2^n times a polynomial on [-ln2/2, ln2/2]. NaN stays NaN.
INLINE vec exp_of(vec x) {
  const float round = 12582912.f;  // adding `round` leaves an integer in the lowest bits
  vec c = within(x, -87.f, 88.f);
  vec shifted = fused(c, all_of(1.44269504f), all_of(round)), n = shifted - round;
  vec r = fused(n, all_of(-0.693359375f), c);
  r = fused(n, all_of(2.12194440e-4f), r);
  vec p = all_of(1.9875691500e-4f);
  p = fused(p, r, all_of(1.3981999507e-3f));
  p = fused(p, r, all_of(8.3334519073e-3f));
  p = fused(p, r, all_of(4.1665795894e-2f));
  p = fused(p, r, all_of(1.6666665459e-1f));
  p = fused(p, r, all_of(5.0000001201e-1f));
  p = fused(p, r * r, r + 1.f);
  return p * (vec)(((uvec)shifted << 23) + 0x3f800000);
}

// 1 / x to 2^-23 for x >= 1.
INLINE vec reciprocal(vec x) {
#ifdef __AVX512F__  // a step of Newton's method takes a quarter of a division's time
  vec y = (vec)_mm512_rcp14_ps((__m512)x);
  return fused(y, fused(-x, y, all_of(1.f)), y);
#else
  return 1.f / x;
#endif
}

// x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), which is GELU's tanh form.
INLINE vec gelu_of(vec x) {
  vec u = x * fused(x * x, all_of(0.0713548162726f), all_of(1.5957691216057f));
  return x * reciprocal(exp_of(-u) + 1.f);
}

// x times the normal distribution, to 2e-7: formula 7.1.26 of Abramowitz and Stegun.
INLINE vec gelu_erf_of(vec x) {
  vec z = within(choose((uvec)(x < 0.f), -x, x), 0.f, 13.f), t = reciprocal(fused(z, all_of(0.23164190f), all_of(1.f)));
  vec p = all_of(1.061405429f);
  p = fused(p, t, all_of(-1.453152027f));
  p = fused(p, t, all_of(1.421413741f));
  p = fused(p, t, all_of(-0.284496736f));
  p = fused(p, t, all_of(0.254829592f));
  vec tail = p * t * 0.5f * exp_of(z * z * -0.5f);
  return x * choose((uvec)(x < 0.f), tail, 1.f - tail);
}

// x sigmoid(x)
INLINE vec silu_of(vec x) { return x * reciprocal(exp_of(-x) + 1.f); }
