// What formats with weights of 8 bits or fewer share: inputs rounded to bytes with a scale for each group of them, and
// products of bytes. Sums of such products are exact in int32, so tiles and vectors of any width give the same bits,
// and a product may take whichever is faster for its number of rows.
#pragma once
#include <math.h>
#include <stdlib.h>

#include "panels.h"

enum { WHOLE_TILE = 16, WIDEST_GROUP = 64 };  // rows are allocated in multiples of a tile's

// A group of inputs: bytes up to 127 times peak / 127. All outputs of a row that has an infinity or a NaN are NaN. A
// group of numbers so small that 127 / peak overflows is zero.
INLINE void round_group(const bf16 *x, int8_t *bytes, float *scale, int32_t *start, int group, int offset) {
  const float round = 12582912.f;  // adding it leaves the nearest integer in the lowest bits
  uint32_t most = 0, sign_less;
  for (int i = 0; i < group; i++) most = (x[i] & 0x7fff) > most ? x[i] & 0x7fff : most;
  int finite = most < 0x7f80;
  float peak;
  sign_less = most << 16;
  memcpy(&peak, &sign_less, 4);
  *scale = finite ? peak / 127.f : NAN;
  *start = 0;
  if (!finite || peak < 1e-30f) {
    memset(bytes, 0, (size_t)group);
    return;
  }
  vec inverse = all_of(127.f / peak);
  int32_t values[WIDEST_GROUP], sum = 0;
  for (int i = 0; i < group; i += LANES)
    store_floats((float *)values + i, load_bf16(x + i, LANES) * inverse + round, LANES);
  for (int i = 0; i < group; i++) {
    bytes[i] = (int8_t)(values[i] - 0x4b400000);
    sum += values[i] - 0x4b400000;
  }
  *start = -offset * sum;
}

INLINE void round_row(const Inputs *in, int64_t row, int group) {
  const bf16 *x = in->x + row * in->k;
  int8_t *bytes = in->bytes + row * in->stride;
  float *scales = in->scales + row * in->groups;
  int32_t *starts = in->starts + row * in->groups;
  for (int64_t g = 0; g < in->groups; g++) {
    bf16 last[WIDEST_GROUP] = {0};
    const bf16 *from = x + g * group;
    if ((g + 1) * group > in->k) from = memcpy(last, from, (size_t)(in->k - g * group) * sizeof *last);
    round_group(from, bytes + g * group, scales + g, starts + g, group, in->offset);
  }
}

static void round_rows(void *job, int64_t first, int64_t last, int worker) {
  const Inputs *in = job;
  for (int64_t row = first; row < last; row++)
    if (in->group == 64) round_row(in, row, 64);
    else round_row(in, row, 32);
}

static int64_t padded(int64_t k, int64_t group) { return (k + group - 1) / group * group; }

// Lays out inputs in memory that belongs to this thread and grows with the largest product. Returns 0 if there is none.
static int place_inputs(Inputs *in, const bf16 *x, int64_t m, int64_t k, int group, int offset) {
  static _Thread_local char *memory;
  static _Thread_local int64_t size;
  int64_t rows = padded(m, WHOLE_TILE), groups = padded(k, group) / group, stride = padded(k, WIDEST_GROUP);
  if (stride % 512 == 0) stride += 64;  // else rows share few sets of the first-level cache
  int64_t needed = rows * (stride + 8 * groups);
  if (needed > size) {
    free(memory);
    size = padded(needed, 1 << 16);
    memory = aligned_alloc(64, (size_t)size);
    if (!memory) return size = 0;
    memset(memory, 0, (size_t)size);
  }
  float *scales = (float *)(memory + rows * stride);
  memset(scales + m * groups, 0, (size_t)((rows - m) * groups) * sizeof *scales);  // tiles multiply these rows, too
  *in = (Inputs){x, (int8_t *)memory, scales, (int32_t *)(scales + rows * groups), k, stride, groups, group, offset};
  return 1;
}

// ---- products of bytes ----

#if defined(HAS_TILES) && defined(__AMX_INT8__)
#define HAS_INT8_TILES 1
static void release_int8_tiles(void) { _tile_release(); }  // tiles in use are saved at every task switch
#else
#define HAS_INT8_TILES 0
static void release_int8_tiles(void) {}
#endif

typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

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

// sum and the products of 4 bytes of w with 4 signed ones of x, for each lane. Most processors take unsigned bytes of
// w, so that weights from -128 on are stored with BYTE_OFFSET added.
#ifdef __ARM_FEATURE_DOTPROD
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
#else
  // Sums of two products of bytes may not fit the 16 bits of vpmaddubsw, so even and odd bytes are multiplied apart.
  ivec even = w & 0x00ff00ff, odd = (ivec)((uvec)w >> 8) & 0x00ff00ff;
#if defined(__AVX512BW__)
  __m512i v = (__m512i)x, even_x = _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8), odd_x = _mm512_srai_epi16(v, 8);
  sum += (ivec)_mm512_madd_epi16((__m512i)even, even_x) + (ivec)_mm512_madd_epi16((__m512i)odd, odd_x);
#elif defined(__AVX2__) && LANES == 8
  __m256i v = (__m256i)x, even_x = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8), odd_x = _mm256_srai_epi16(v, 8);
  sum += (ivec)_mm256_madd_epi16((__m256i)even, even_x) + (ivec)_mm256_madd_epi16((__m256i)odd, odd_x);
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
