// Attention to keys and values of 8 bits, with a scale for each token and head of keys: a part of paged_attention.c.
//
// A block of 16 tokens is 16 * D bytes and then its 16 scales, so that what moves a page moves its scales. An
// instruction adds four products of bytes, so four dimensions of a key lie side by side, and four tokens of a value's
// column:
//   keys    [D/4][16][4], and behind it what is left of D, [D%4][16]; BYTE_OFFSET is added to each number
//   values  [4][D][4]
//
// A query is rounded to 15 bits, and so are its weights times the scales of their values: both have a scale for each
// query, and a high and a low byte, or 16 bits where these are multiplied faster. No weight is negative, so its bytes
// may stand where an instruction takes unsigned ones. Sums of products are exact integers, the same in every order: for
// a token alone and in a chunk.
#pragma once
#include "attention_any.h"
#include "bytes.h"

enum { LOW = 128, FINEST = 127 * LOW };    // a number is high * LOW + low, at most FINEST
enum { SEGMENT = 32 };                     // blocks of values whose weighted sums fit 31 bits
enum { SUMS = LANES == 16 ? 8 : 4 };       // pairs of sums that fit the registers
enum { VALUE_SUMS = PAIRS_OF_BYTES ? 8 : SUMS };  // the same beside values
enum { TOGETHER = LANES == 16 || PAIRS_OF_BYTES ? QUERIES : 2 };  // queries that share a load
#define FLATTENED 1e-34f                   // of weights: up to it they are zero, or their inverse could be infinite

// Numbers of 15 bits lie as all high bytes, then all low ones; or as int16, and then of each four the first and the
// third, the second and the fourth.
typedef struct {
  int8_t bytes[2 * MAX_HEAD_SIZE];                 // zeros behind D
  int32_t start;                                   // of a score, makes up for BYTE_OFFSET
  float scale;
} SplitQuery;

// A query's weights of a block, in the place of its scores.
typedef struct {
  int8_t bytes[2 * BLOCK], unused[2 * BLOCK];
} SplitWeights;

INLINE vec load_some(const char *from, int d, int D, int half) {
  return half ? load_bf16((const bf16 *)from + d, D - d) : load_floats((const float *)from + d, D - d);
}

// The largest of magnitudes: NaN if one is infinite or NaN, and zero up to `least`.
INLINE float peak_of(uvec magnitudes, float least) {
  uint32_t bits = largest_of(magnitudes);
  float peak;
  memcpy(&peak, &bits, 4);
  return bits >= 0x7f800000 ? NAN : peak > least ? peak : 0;
}

INLINE float peak_of_row(const char *from, int D, int half) {
  uvec most = {0};
  for (int d = 0; d < D; d += LANES) most = larger_of(most, magnitude(load_some(from, d, D, half)));
  return peak_of(most, 1e-30f);  // smaller numbers are zeros: the inverse of their scale could be infinite
}

// LANES numbers to places `at` and following of `count`. Low bytes are from -`below` on: LOW / 2 where numbers have both
// signs, so that the high bytes fit, and 0 where no number is negative.
INLINE void split(ivec x, int8_t *to, int at, int count, int below) {
#if PAIRS_OF_BYTES
  __m256i v = _mm256_shuffle_epi32((__m256i)x, 0xd8);
  __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  memcpy(to + 2 * at, &pairs, sizeof pairs);
#else
  ivec above = (x + below) >> 7;
  store_bytes(to + at, above);
  store_bytes(to + count + at, x - (above << 7));
#endif
}

INLINE int number_at(const int8_t *from, int at, int count) {
#if PAIRS_OF_BYTES
  int16_t number;
  memcpy(&number, from + 2 * (at / 4 * 4 + at % 2 * 2 + at % 4 / 2), sizeof number);
  return number;
#else
  return from[at] * LOW + from[count + at];
#endif
}

// Sums of products of bytes with numbers of 15 bits; AVX2 has no use for the second.
typedef struct {
  ivec high, low;
} Sums;

// 4 bytes of keys, or of values, times the numbers from place `at` on of `count`, for each lane.
INLINE void add_products(Sums *sums, ivec bytes, const int8_t *from, int at, int count, int of_values) {
#if PAIRS_OF_BYTES  // products of 16 bits take half the instructions of two products of bytes
  __m256i first = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)bytes, 8), 8);
  __m256i second = _mm256_srai_epi16((__m256i)bytes, 8);
  sums->high += (ivec)_mm256_madd_epi16(first, (__m256i)four_bytes(from + 2 * at));
  sums->high += (ivec)_mm256_madd_epi16(second, (__m256i)four_bytes(from + 2 * at + 4));
#else
  ivec high = four_bytes(from + at), low = four_bytes(from + count + at);
  sums->high = of_values ? dot(sums->high, high, bytes) : dot(sums->high, bytes, high);
  sums->low = of_values ? dot(sums->low, low, bytes) : dot(sums->low, bytes, low);
#endif
}

INLINE ivec total_of(Sums sums) { return PAIRS_OF_BYTES ? sums.high : (sums.high << 7) + sums.low; }

// Write D numbers as bytes plus `offset` and return their scale, which is NaN where one is infinite or NaN, so that what
// reads the token becomes NaN too.
INLINE float quantize(const char *from, int8_t *to, int D, int half, int offset) {
  float peak = peak_of_row(from, D, half), inverse = peak > 0 ? 127 / peak : 0;
  for (int d = 0; d < D; d += LANES)
    store_bytes(to + d, rounded(load_some(from, d, D, half) * inverse) + offset);
  return peak / 127;
}

INLINE void split_query(const char *from, SplitQuery *q, int D, int half) {
  float peak = peak_of_row(from, D, half), inverse = peak > 0 ? FINEST / peak : 0;
  ivec sum = {0};
  for (int d = 0; d < D; d += LANES) {
    ivec x = rounded(load_some(from, d, D, half) * inverse);
    split(x, q->bytes, d, MAX_HEAD_SIZE, LOW / 2);
    sum += x;
  }
  q->start = -BYTE_OFFSET * sum_of(sum);
  q->scale = peak / FINEST;
}

// Turn the weights of a query's n keys, and the zeros behind them, into SplitWeights of `blocks` blocks; return their
// scale.
APART float split_weights(const Call *c, const int32_t *row, int h, float *w, int n, int blocks) {
  uvec most = {0};
  for (int t = 0; t < n; t += LANES) {
    const float *scales = scales_at(c, block_at(c, c->values, row, h, t / BLOCK)) + t % BLOCK;
    vec scaled = load_floats(w + t, n - t) * load_floats(scales, n - t);  // stale scales may be NaN
    store_floats(w + t, scaled, LANES);
    most = larger_of(most, magnitude(scaled));
  }
  float peak = peak_of(most, FLATTENED), inverse = peak > 0 ? FINEST / peak : 0;
  for (float *end = w + blocks * BLOCK; w < end; w += BLOCK) {  // in place: a copy of bytes would wait for their stores
    ivec x[PARTS];
    UNROLL for (int p = 0; p < PARTS; p++) x[p] = rounded(load_floats(w + p * LANES, LANES) * inverse);
    UNROLL for (int p = 0; p < PARTS; p++) split(x[p], (int8_t *)w, p * LANES, BLOCK, 0);
  }
  return peak / FINEST;
}

// As append().
INLINE void append_int8(const Call *c, const int32_t *row, int h, int first, int position, int count) {
  const int D = c->D, whole = D / 4 * 4;
  const long bytes = (long)c->KV * D * (c->half ? 2 : 4);
  int8_t numbers[MAX_HEAD_SIZE];
  for (int r = 0; r < count; r++) {
    int lane = (position + r) % BLOCK, b = (position + r) / BLOCK;
    const char *new = new_key(c, first + r, h);
    char *key = block_at(c, c->keys, row, h, b), *value = block_at(c, c->values, row, h, b);
    scales_at(c, key)[lane] = quantize(new, numbers, D, c->half, BYTE_OFFSET);
    for (int d = 0; d < whole; d += 4) memcpy(key + d * BLOCK + lane * 4, numbers + d, 4);
    for (int d = whole; d < D; d++) key[d * BLOCK + lane] = (char)numbers[d];
    scales_at(c, value)[lane] = quantize(new + bytes, numbers, D, c->half, 0);
    value += lane / 4 * 4 * D + lane % 4;
    for (int d = 0; d < D; d++) value[4 * d] = (char)numbers[d];
  }
}

// As score().
INLINE void score_bytes(const SplitQuery *q, const char *const *key, const char *const *ahead, float *scores,
                        long stride, int D, int nq, int nk) {
  Sums sums[TOGETHER][AHEAD * PARTS];
  UNROLL for (int i = 0; i < nq; i++) {
    UNROLL for (int j = 0; j < nk * PARTS; j++) sums[i][j] = (Sums){{0}, {0}};
  }
  for (int d = 0; d < D / 4 * 4; d += 4) {
    ivec k[AHEAD * PARTS];
    UNROLL for (int j = 0; j < nk * PARTS; j++) k[j] = load_ints(key[j / PARTS] + d * BLOCK + j % PARTS * LANES * 4);
    UNROLL for (int j = 0; j < nk; j++)
      if (ahead) prefetch(ahead[j] + d * BLOCK);
    UNROLL for (int i = 0; i < nq; i++)
      UNROLL for (int j = 0; j < nk * PARTS; j++) add_products(&sums[i][j], k[j], q[i].bytes, d, MAX_HEAD_SIZE, 0);
  }
  UNROLL for (int j = 0; j < nk * PARTS; j++) {
    const char *rest = key[j / PARTS] + j % PARTS * LANES;
    vec scale = load_floats((const float *)(key[j / PARTS] + D * BLOCK) + j % PARTS * LANES, LANES);
    if (ahead && j % PARTS == 0) prefetch(ahead[j / PARTS] + D * BLOCK);
    UNROLL for (int i = 0; i < nq; i++) {
      ivec total = total_of(sums[i][j]) + q[i].start;
      for (int d = D / 4 * 4; d < D; d++)
        total += load_bytes((const int8_t *)rest + d * BLOCK) * number_at(q[i].bytes, d, MAX_HEAD_SIZE);
      store_floats(scores + i * stride + j * LANES, __builtin_convertvector(total, vec) * scale, LANES);
    }
  }
}

// How many blocks are summed up as integers from this one on: cut where a whole sequence would be.
INLINE int segment_at(const Queries *t, int block) { return SEGMENT - (t->hidden + block) % SEGMENT; }

// Columns d0 .. d0 + nc * LANES of the sums of values of nq queries, `stride` blocks of weights apart.
INLINE void weigh_bytes(const Call *c, const Queries *t, const SplitWeights *w, long stride, float *o, int d0, int nq,
                        int nc, int stream) {
  const int D = c->D, blocks = (t->keys + BLOCK - 1) / BLOCK;
  vec sum[TOGETHER][4];
  UNROLL for (int i = 0; i < nq; i++)
    UNROLL for (int j = 0; j < nc; j++) sum[i][j] = (vec){0};
  for (int first = 0, next; first < blocks; first = next) {
    next = first + segment_at(t, first);
    Sums sums[TOGETHER][4];
    UNROLL for (int i = 0; i < nq; i++)
      UNROLL for (int j = 0; j < nc; j++) sums[i][j] = (Sums){{0}, {0}};
    for (int b = first; b < blocks && b < next; b++) {
      const char *value = block_at(c, c->values, t->pages, t->head, b) + 4 * d0;
      const char *ahead = stream ? stream_at(c, t->pages, t->head, blocks, blocks + b + FAR) + 4 * d0 : value;
      if (stream && d0 == 0) prefetch(ahead + D * BLOCK);  // scales
      for (int four = 0; four < BLOCK; four += 4, value += 4 * D, ahead += 4 * D) {
        ivec v[4];
        UNROLL for (int j = 0; j < nc; j++) {
          v[j] = load_ints(value + 4 * LANES * j);
          if (stream && 4 * LANES * j % LINE == 0) prefetch(ahead + 4 * LANES * j);
        }
        UNROLL for (int i = 0; i < nq; i++)
          UNROLL for (int j = 0; j < nc; j++) add_products(&sums[i][j], v[j], w[i * stride + b].bytes, four, BLOCK, 1);
      }
    }
    UNROLL for (int i = 0; i < nq; i++)
      UNROLL for (int j = 0; j < nc; j++) sum[i][j] += __builtin_convertvector(total_of(sums[i][j]), vec);
  }
  UNROLL for (int i = 0; i < nq; i++)
    UNROLL for (int j = 0; j < nc; j++) store_floats(o + i * MAX_HEAD_SIZE + d0 + j * LANES, sum[i][j], LANES);
}

// Columns d0 and following of a head that is narrower than a vector, or its remainder.
APART void weigh_rest_bytes(const Call *c, const Queries *t, const SplitWeights *w, float *o, int d0) {
  const int blocks = (t->keys + BLOCK - 1) / BLOCK;
  for (int d = d0; d < c->D; d++) {
    o[d] = 0;
    for (int first = 0, next; first < blocks; first = next) {
      next = first + segment_at(t, first);
      int32_t total = 0;
      for (int b = first; b < blocks && b < next; b++) {
        const int8_t *value = (const int8_t *)block_at(c, c->values, t->pages, t->head, b) + 4 * d;
        for (int i = 0; i < BLOCK; i++) total += value[i / 4 * 4 * c->D + i % 4] * number_at(w[b].bytes, i, BLOCK);
      }
      o[d] += (float)total;
    }
  }
}

// Attention of nq queries, the first of them number i0, or as many of them as there are; see attend().
INLINE void attend_bytes(const Call *c, const Queries *t, float *scores, int i0, int nq, int stream) {
  const int D = c->D, blocks = (t->keys + BLOCK - 1) / BLOCK, count = t->count - i0 < nq ? t->count - i0 : nq;
  const int fit = SUMS / nq / PARTS, nk = fit > AHEAD ? AHEAD : fit > 1 ? fit : 1;
  const int columns = VALUE_SUMS / nq > 4 ? 4 : VALUE_SUMS / nq > 1 ? VALUE_SUMS / nq : 1;
  const long stride = c->stride / BLOCK;
  SplitQuery q[TOGETHER];
  for (int i = 0; i < nq; i++) split_query(query_values(c, t->at[i0 + i]), &q[i], D, c->half);
  for (int b = 0; b < blocks; b += nk) {
    const char *key[AHEAD], *ahead[AHEAD];
    UNROLL for (int j = 0; j < nk; j++) {  // entries behind the last block repeat it: no memory is read for them
      key[j] = block_at(c, c->keys, t->pages, t->head, b + j < blocks ? b + j : blocks - 1);
      if (!stream) continue;
      ahead[j] = stream_at(c, t->pages, t->head, blocks, b + j + FAR);
      prefetch(scales_at(c, stream_at(c, t->pages, t->head, blocks, blocks + b + j)));
    }
    score_bytes(q, key, stream ? ahead : 0, scores + b * BLOCK, c->stride, D, nq, nk);
  }
  float factor[TOGETHER], o[TOGETHER * MAX_HEAD_SIZE];
  for (int i = 0; i < nq; i++) {
    float *w = scores + i * c->stride;
    float sum = softmax(c, w, t->at[i0 + i], blocks * BLOCK, c->scale * q[i].scale);
    factor[i] = split_weights(c, t->pages, t->head, w, t->at[i0 + i].position + 1, blocks) / sum;
  }
  const SplitWeights *w = (const SplitWeights *)scores;
  int d = 0;
  for (; d + columns * LANES <= D; d += columns * LANES) weigh_bytes(c, t, w, stride, o, d, nq, columns, stream);
  for (; d + LANES <= D; d += LANES) weigh_bytes(c, t, w, stride, o, d, nq, 1, stream);
  for (int i = 0; i < count; i++) {
    float *from = o + i * MAX_HEAD_SIZE;
    if (d < D) weigh_rest_bytes(c, t, w + i * stride, from, d);
    char *to = output_of(c, t->at[i0 + i]);
    for (int e = 0; e < D; e += LANES) {
      vec y = load_floats(from + e, D - e) * factor[i];
      if (c->half) store_bf16((bf16 *)to + e, y, D - e);
      else store_floats((float *)to + e, y, D - e);
    }
  }
}
