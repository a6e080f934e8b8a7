// Products of bytes, in vectors as wide as the processor's registers. Sums of them are exact in int32, so their order
// never matters.
#pragma once
#include "vectors.h"

INLINE ivec load_ints(const void *p) {
  ivec v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE ivec all_of_int(int32_t x) { return x - (ivec){0}; }

INLINE ivec four_bytes(const int8_t *p) {
  int32_t four;
  memcpy(&four, p, 4);
  return all_of_int(four);
}

// AVX2 alone multiplies unsigned bytes with signed ones and adds two products in 16 bits.
#if defined(__AVX2__) && LANES == 8 && !defined(__AVXVNNI__)
#define PAIRS_OF_BYTES 1
#else
#define PAIRS_OF_BYTES 0
#endif

// sum and the products of 4 bytes of w with 4 of x from -127 on, for each lane. Most processors take unsigned bytes of
// w, so that weights from -128 on are stored with BYTE_OFFSET added.
#if defined(__ARM_FEATURE_DOTPROD) || PAIRS_OF_BYTES
enum { BYTE_OFFSET = 0 };
#else
enum { BYTE_OFFSET = 128 };
#endif
INLINE ivec dot(ivec sum, ivec w, ivec x) {
#if defined(__AVX512VNNI__)
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));  // the intrinsic makes GCC 12 copy every sum
#elif defined(__AVXVNNI__) && LANES == 8
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
#elif defined(__ARM_FEATURE_DOTPROD)
  sum = (ivec)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
#elif PAIRS_OF_BYTES  // |w| times x with w's sign: two such products are at most 2 * 128 * 127, which fits 16 bits
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8((__m256i)x, (__m256i)w));
  sum += (ivec)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  // Sums of two products of bytes may not fit the 16 bits of vpmaddubsw, so even and odd bytes are multiplied apart.
  ivec even = w & 0x00ff00ff, odd = (ivec)((uvec)w >> 8) & 0x00ff00ff;
#if defined(__AVX512BW__)
  __m512i v = (__m512i)x, even_x = _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8), odd_x = _mm512_srai_epi16(v, 8);
  sum += (ivec)_mm512_madd_epi16((__m512i)even, even_x) + (ivec)_mm512_madd_epi16((__m512i)odd, odd_x);
#elif defined(__SSE2__) && LANES == 4
  __m128i v = (__m128i)x, even_x = _mm_srai_epi16(_mm_slli_epi16(v, 8), 8), odd_x = _mm_srai_epi16(v, 8);
  sum += (ivec)_mm_madd_epi16((__m128i)even, even_x) + (ivec)_mm_madd_epi16((__m128i)odd, odd_x);
#else
  sum += (even & 0xffff) * (x << 24 >> 24) + (ivec)((uvec)even >> 16) * (x << 8 >> 24);
  sum += (odd & 0xffff) * (x << 16 >> 24) + (ivec)((uvec)odd >> 16) * (x >> 24);
#endif
#endif
  return sum;
}

// As dot(), for 4-bit w from 0 to 15 and at most eight products: until whole_sum() the sums may be of 16 bits, from 0.
INLINE ivec dot_small(ivec sum, ivec w, ivec x) {
#if PAIRS_OF_BYTES  // 8 * 2 * 15 * 127 fits 16 bits
  __m256i pairs = _mm256_maddubs_epi16((__m256i)w, (__m256i)x);
  __asm__("vpaddw %1, %0, %0" : "+x"(sum) : "x"(pairs));  // else GCC keeps all products in memory and adds them later
  return sum;
#else
  return dot(sum, w, x);
#endif
}

INLINE ivec whole_sum(ivec sum) {
#if PAIRS_OF_BYTES
  return (ivec)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#else
  return sum;
#endif
}

// The nearest integers, of two the even one, to numbers below 2^22. Not by adding 1.5 * 2^23 where there is an
// instruction: the compiler may fuse that with the product that x is, and round once where others round twice.
INLINE ivec rounded(vec x) {
#if defined(__AVX512F__)
  return (ivec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (ivec)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
  return (ivec)_mm_cvtps_epi32((__m128)x);
#elif defined(__aarch64__)
  return (ivec)vcvtnq_s32_f32((float32x4_t)x);
#else
  return (ivec)(x + 12582912.f) - 0x4b400000;
#endif
}

// The lowest byte of each lane.
INLINE void store_bytes(int8_t *p, ivec v) {
#if defined(__AVX512F__)  // gcc narrows in many small steps
  __m128i b = _mm512_cvtepi32_epi8((__m512i)v);
#elif defined(__AVX2__)
  __m256i low = _mm256_and_si256((__m256i)v, _mm256_set1_epi32(0xff));
  __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  int64_t b = _mm_cvtsi128_si64(_mm_packus_epi16(half, half));
#else
  bvec b = __builtin_convertvector(v, bvec);
#endif
  memcpy(p, &b, sizeof b);
}

// Bytes with BYTE_OFFSET.
INLINE ivec load_bytes(const int8_t *p) {
  bvec b;
  memcpy(&b, p, sizeof b);
  return __builtin_convertvector(b, ivec) & (BYTE_OFFSET ? 0xff : -1);
}

// The largest lane, taken as unsigned; and the sum of all.
INLINE uint32_t largest_of(uvec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epu32((__m512i)v);
#elif defined(__AVX2__)
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1)));
#else
  uint32_t most = 0;
  for (int j = 0; j < LANES; j++) most = v[j] > most ? v[j] : most;
  return most;
#endif
}

INLINE int32_t sum_of(ivec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__AVX2__)
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
#else
  int32_t sum = 0;
  for (int j = 0; j < LANES; j++) sum += v[j];
  return sum;
#endif
}

INLINE uvec larger_of(uvec a, uvec b) {
#if defined(__AVX512F__)
  return (uvec)_mm512_max_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (uvec)_mm256_max_epu32((__m256i)a, (__m256i)b);
#else
  uvec more = (uvec)(a > b);
  return (a & more) | (b & ~more);
#endif
}

// The magnitude's bits: ordered as the numbers are, with infinity and NaN above all.
INLINE uvec magnitude(vec x) { return (uvec)x & 0x7fffffff; }
