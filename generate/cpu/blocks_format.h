// GGUF's blocks of 32 inputs as they lie in a panel, for the products in vectors and in tiles.
//
// A panel has for each group 64 scales, for Q4_1 64 minima, then the weights of 64 outputs: 4 steps of [64][4] bytes,
// whose low halves are inputs 4 s to 4 s + 3 of step s, and the high ones those 16 further on; for Q8_0 8 steps.
#pragma once
#include "quantized.h"

enum { BLOCK = 32, MINUS_ONE = -1 };  // MINUS_ONE: of Q4_1, which needs the sum of the inputs

INLINE int weight_bits(int format) { return format == Q8_0 ? 8 : 4; }
INLINE int64_t block_bytes(int format) { return BLOCK * weight_bits(format) / 8 + (format == Q4_1 ? 4 : 2); }
INLINE int64_t group_bytes(int format) { return PANEL * block_bytes(format); }
INLINE int64_t blocks_panel_bytes(int format, int64_t k) { return padded(k, BLOCK) / BLOCK * group_bytes(format); }

INLINE vec load_halves(const char *p) {
#if LANES == 16
  return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
#elif LANES == 8 && defined(__F16C__)
  return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
#else
  hvec h;
  memcpy(&h, p, sizeof h);
  uvec bits = __builtin_convertvector(h, uvec);
  vec magnitude = (vec)((bits & 0x7fff) << 13) * 0x1p112f;  // the exponent's bias is 112 more; subnormal ones fit, too
  return (vec)((uvec)magnitude | (bits & 0x8000) << 16);
#endif
}
