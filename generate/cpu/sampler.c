// Greedy and temperature sampling of whole rows of logits without sorting and without writing: three passes over a row
// that lies in the cache. Each row is computed by itself, in one order, so its token does not depend on the others. A row
// may have a mask, a bit for each token that may follow; a mask of ones changes nothing.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "bytes.h"
#include "kernels.h"
#include "team.h"

enum { GROUP = 16, BLOCK = 1024 };  // tokens: lanes of a sum, on every processor, and of a block of weights

#define SPECIALIZED INLINE  // so that rows without a mask do not test for one

enum { ALL = (1 << GROUP) - 1 };

// The bits of the GROUP tokens from i on, a multiple of GROUP.
SPECIALIZED int32_t bits_of(const uint32_t *mask, int64_t i) { return mask ? mask[i >> 5] >> (i & 31) & ALL : ALL; }

SPECIALIZED int is_allowed(const uint32_t *mask, int64_t i) { return !mask || mask[i >> 5] >> (i & 31) & 1; }

// e^x for x <= 0, to 2 units in the last place; 0 below -87.
static inline float exp_negative(float x) {
  float c = x < -87.f ? -87.f : x;
  float n = rintf(c * 1.44269504f);
  float r = c - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  int32_t bits = ((int32_t)n + 127) << 23;
  float scale;
  memcpy(&scale, &bits, 4);
  return x < -87.f ? 0.f : p * scale;
}

INLINE vec larger(vec a, vec b) { return choose((uvec)(a > b), a, b); }

// The largest value of x, NaN if any is NaN or infinite.
static float largest(const float *x, int64_t n) {
  float m = x[0], bad = 0;
  vec most[2] = {all_of(m), all_of(m)}, wrong[2] = {{0}};
  int64_t i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES)
    UNROLL for (int j = 0; j < 2; j++) {
      vec v = load_floats(x + i + j * LANES, LANES);
      most[j] = larger(v, most[j]);
      wrong[j] += v * 0.f;
    }
  for (; i < n; i++) m = x[i] > m ? x[i] : m, bad += x[i] * 0.f;
  most[0] = larger(most[0], most[1]), wrong[0] += wrong[1];
  for (int j = 0; j < LANES; j++) m = most[0][j] > m ? most[0][j] : m, bad += wrong[0][j];
  return m + bad;
}

// The largest value of x, all of which are finite, among the tokens of the mask; -INFINITY if there are none.
static float largest_allowed(const float *x, const uint32_t *mask, int64_t n) {
  float m = -INFINITY;
  vec most = all_of(m);
  for (int64_t i = 0; i < n; i += GROUP) {
    int32_t bits = bits_of(mask, i);
    if (bits == ALL && i + GROUP <= n) {
      UNROLL for (int j = 0; j < GROUP; j += LANES) most = larger(load_floats(x + i + j, LANES), most);
      continue;
    }
    for (; bits; bits &= bits - 1) {
      int64_t k = i + __builtin_ctz(bits);
      if (k < n && x[k] > m) m = x[k];
    }
  }
  for (int j = 0; j < LANES; j++) m = most[j] > m ? most[j] : m;
  return m;
}

// The first place of m in x, which is there.
SPECIALIZED int64_t place_of(float m, const float *x, const uint32_t *mask, int64_t n) {
  int64_t i = 0;
  for (; i + GROUP <= n; i += GROUP) {
    if (!bits_of(mask, i)) continue;
    ivec any = {0};
    UNROLL for (int j = 0; j < GROUP; j += LANES) any |= load_floats(x + i + j, LANES) == m;
    if (largest_of((uvec)any)) break;
  }
  while (x[i] != m || !is_allowed(mask, i)) i++;
  return i;
}

// The weight of the token at i. One that is not allowed may be larger than m.
SPECIALIZED float weight(const float *x, const uint32_t *mask, int64_t i, float m, float inverse_temperature) {
  float over = (x[i] - m) * inverse_temperature;
  return is_allowed(mask, i) ? exp_negative(over) : 0.f;
}

// The sum of the weights of n tokens from `first` on, a multiple of GROUP.
SPECIALIZED double block_sum(const float *x, const uint32_t *mask, int64_t first, int64_t n, float m,
                             float inverse_temperature) {
  float s[GROUP] = {0};
  int64_t i = first, end = first + n;
  for (; i + GROUP <= end; i += GROUP) {
    int32_t bits = bits_of(mask, i);
    if (bits == ALL)
      for (int j = 0; j < GROUP; j++) s[j] += exp_negative((x[i + j] - m) * inverse_temperature);
    else
      for (; bits; bits &= bits - 1) {
        int j = __builtin_ctz(bits);
        s[j] += exp_negative((x[i + j] - m) * inverse_temperature);
      }
  }
  for (; i < end; i++) s[0] += weight(x, mask, i, m, inverse_temperature);
  double sum = 0;
  for (int j = 0; j < GROUP; j++) sum += s[j];
  return sum;
}

SPECIALIZED int64_t draw(const float *x, const uint32_t *mask, int64_t n, float m, float inverse_temperature, double u) {
  double sums[MAX_LOGITS / BLOCK], total = 0;
  int64_t blocks = (n + BLOCK - 1) / BLOCK, b = 0;
  for (int64_t i = 0; i < blocks; i++) {
    int64_t size = n - i * BLOCK < BLOCK ? n - i * BLOCK : BLOCK;
    sums[i] = block_sum(x, mask, i * BLOCK, size, m, inverse_temperature);
    total += sums[i];
  }
  double goal = u * total, below = 0;
  while (b + 1 < blocks && below + sums[b] <= goal) below += sums[b++];
  int64_t last = -1;
  for (int64_t i = b * BLOCK; i < n && i < (b + 1) * BLOCK; i++) {
    float e = weight(x, mask, i, m, inverse_temperature);
    if (e > 0) last = i;
    below += e;
    if (below > goal) return i;
  }
  if (last >= 0) return last;  // rounding: the goal lay at the block's very end
  return place_of(m, x, mask, n);
}

// The number in [0, 1) that draws the token at a position: splitmix64, as uniform() in sampling.py.
static double uniform(uint64_t seed, int64_t position) {
  uint64_t z = seed * 0xD1342543DE82EF95u + ((uint64_t)position + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

typedef struct {
  const float *logits, *inverse_temperature;
  const uint64_t *seeds;
  const int64_t *positions, *masks;
  int64_t n, *out;
} Rows;

SPECIALIZED int64_t token_of(const Rows *t, int64_t r, const float *x, const uint32_t *mask, float m) {
  if (t->inverse_temperature[r] <= 0) return place_of(m, x, mask, t->n);
  return draw(x, mask, t->n, m, t->inverse_temperature[r], uniform(t->seeds[r], t->positions[r]));
}

static void sample_some(void *job, int64_t first, int64_t last, int worker) {
  const Rows *t = job;
  for (int64_t r = first; r < last; r++) {
    const float *x = t->logits + r * t->n;
    float m = largest(x, t->n);
    const uint32_t *mask = t->masks ? (const uint32_t *)(uintptr_t)t->masks[r] : NULL;
    if (!isfinite(m)) {
      t->out[r] = -1;
    } else if (!mask) {
      t->out[r] = token_of(t, r, x, NULL, m);
    } else {
      m = largest_allowed(x, mask, t->n);
      t->out[r] = m == -INFINITY ? -2 : token_of(t, r, x, mask, m);
    }
  }
}

void sample_tokens(const float *logits, int64_t rows, int64_t n, const float *inverse_temperature,
                   const uint64_t *seeds, const int64_t *positions, const int64_t *masks, int64_t *out) {
  Rows t = {logits, inverse_temperature, seeds, positions, masks, n, out};
  int64_t grain = 50000 / (n + 1) + 1;  // fewer are not worth another thread
  share_out(sample_some, &t, rows, grain);
}
