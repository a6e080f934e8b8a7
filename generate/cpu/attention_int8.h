// Keys and values as 8-bit numbers with a scale for each token and head of keys: a part of paged_attention.c.
//
// A block of 16 tokens is 16 * D bytes in the order of attention_any.h and then its 16 scales, so that what moves a
// page moves its scales. Keys are multiplied as they are and a score by its key's scale; a weight is multiplied by its
// value's scale. Every sum is float32 in the order of the other formats.
#pragma once
#include <math.h>

#include "attention_call.h"

// Write the D numbers of `from` as to[d * step] = from[d] / scale, rounded to -127..127, and return the scale. It is
// NaN where a number is infinite or NaN, so that what reads the token becomes NaN too.
INLINE float quantize(const char *from, int8_t *to, int D, long step, int half) {
  float x[MAX_HEAD_SIZE], most = 0, poison = 0;
  for (int d = 0; d < D; d++) x[d] = load1(from, d, half ? KV_BF16 : KV_F32);
#pragma omp simd reduction(max : most) reduction(+ : poison)
  for (int d = 0; d < D; d++) {
    float a = fabsf(x[d]);
    most = a > most ? a : most;
    poison += a * 0;
  }
  int usable = poison == 0 && most > 1e-30f;  // smaller numbers are 0: their inverse could be infinite
  float inverse = usable ? 127 / most : 0;
  int8_t q[MAX_HEAD_SIZE];
  for (int d = 0; d < D; d++) q[d] = usable ? (int8_t)(int)rintf(x[d] * inverse) : 0;
  for (int d = 0; d < D; d++) to[d * step] = q[d];
  return (usable ? most / 127 : 0) + poison;
}

// As append().
INLINE void append_int8(const Call *c, const int32_t *row, int h, int first, int position, int count) {
  long bytes = (long)c->KV * c->D * (c->half ? 2 : 4);
  for (int r = 0; r < count; r++) {
    int lane = (position + r) % BLOCK, b = (position + r) / BLOCK;
    const char *new = new_key(c, first + r, h);
    char *key = block_at(c, c->keys, row, h, b), *value = block_at(c, c->values, row, h, b);
    scales_at(c, key)[lane] = quantize(new, (int8_t *)key + lane, c->D, BLOCK, c->half);
    scales_at(c, value)[lane] = quantize(new + bytes, (int8_t *)value + lane * c->D, c->D, 1, c->half);
  }
}

// Multiply the first n weights of a row by the scales of their values.
APART void scale_weights(const Call *c, const int32_t *row, int h, float *w, int n) {
  for (int b = 0; b * BLOCK < n; b++) {
    const float *scales = scales_at(c, block_at(c, c->values, row, h, b));
    for (int t = 0; t < BLOCK; t++) w[b * BLOCK + t] *= b * BLOCK + t < n ? scales[t] : 0;
  }
}
