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
// Each head of keys and values serves the H / KV query heads of its group, which share every load of a key, as the
// tokens of a chunk do. attention_any.h computes any size of heads. bfloat16 heads of a multiple of 64 have three
// more ways on processors that multiply bfloat16, the same that linear layers have, and a process takes one: dot
// products of pairs (attention_bf16.h), float32 (attention_fma.h), or AMX's tiles for chunks and groups of heads
// (attention_tiles.h), where single queries take float32 in the same order of sums.
//
// The pools are [pages, KV, P, D], but the order of values inside one (page, head) tile is this file's own:
//   keys    [P/16][D][16]    16 keys are the lanes of a vector: no horizontal sum in a score
//   values  [P][D]
// and in the three ways of bfloat16, whose instructions multiply and add pairs:
//   keys    [P/16][D/2][16][2]
//   values  [P/2][D][2]
// Either way 16 keys (a block) are one contiguous run of 16 * D values in both pools, in 8-bit pools with their 16
// scales behind them (attention_int8.h).
//
// A token's sums have one order, whichever tokens are computed beside it: a score adds d = 0, 1, ...; the maximum has
// no order; weights are added lane by lane, block after block; an output adds keys 0, 1, ... A token of a chunk and the
// same token decoded alone therefore agree to the bit; only the number of parallel chains differs. Keys behind a
// token's position have weight 0 in its row. Values behind the last position of a block of queries are never
// multiplied, so stale pages may hold any bits.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention_any.h"
#include "attention_call.h"
#include "attention_int8.h"
#include "kernels.h"
#include "team.h"
#ifdef __AVX512BF16__
#include "attention_tiles.h"
#endif

#define APPENDED 4       // (sequence, head)s whose new keys are written before they are read
#define FLUSH_DENORMALS 0x8040u  // of the control register: results and operands
#define FEW 2            // queries of a token for which tiles, of 16 rows, take longer than vectors
#define ALONE (1 << 18)  // bytes of keys and values below which waking other threads costs more than it saves

// A piece of the step: up to `most` queries of one head of keys of one sequence. Pieces are numbered by sequence, then
// by head, then by query.
typedef struct {
  int sequence, slots, head, slot;  // slots: all queries of the sequence that see this head; slot: the first of them
} Item;

INLINE int new_tokens(const Call *c, int sequence) { return c->cu_seqlens[sequence + 1] - c->cu_seqlens[sequence]; }

INLINE int pieces_of(const Call *c, int slots) { return (slots + c->most - 1) / c->most; }

static Item item_at(const Call *c, int number) {
  int low = 0, high = c->n;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (c->items[middle] <= number) low = middle;
    else high = middle;
  }
  int slots = new_tokens(c, low) * c->shared, pieces = pieces_of(c, slots);
  return (Item){low, slots, (number - c->items[low]) / pieces, (number - c->items[low]) % pieces * c->most};
}

static Item next_item(const Call *c, Item item) {
  item.slot += c->most;
  if (item.slot < item.slots) return item;
  item.slot = 0;
  if (++item.head < c->KV) return item;
  item.head = 0;
  if (++item.sequence < c->n) item.slots = new_tokens(c, item.sequence) * c->shared;
  return item;
}

static int way = DOT;  // of bfloat16 heads of a multiple of 64

static int takes_pairs(const Call *c) {
#ifdef __AVX512BF16__
  return c->format == KV_BF16 && c->D % 64 == 0;
#else
  return 0;
#endif
}

static void append_new(const Call *c, int i, int h) {
  const int32_t *row = c->block_tables + (long)i * c->max_pages;
  int first = c->cu_seqlens[i], count = new_tokens(c, i), position = c->context_lens[i] - count;
#ifdef __AVX512BF16__
  if (takes_pairs(c)) {
    append_pairs(c, row, h, first, position, count);
    return;
  }
#endif
  if (c->format == KV_INT8) append_int8(c, row, h, first, position, count);
  else if (c->half) append(c, row, h, first, position, count, 1);
  else append(c, row, h, first, position, count, 0);
}

#ifdef __AVX512BF16__
// Numbers of queries that a group often has, and heads of 64, are compiled apart.
INLINE void attend_item_in_floats(const Call *c, const Queries *q, int is_token, float *scores) {
  switch (q->count) {
    case 1: attend_fma(c, q, scores, c->D, 1, 1); break;
    case 2: attend_fma(c, q, scores, c->D, 2, 1); break;
    case 3:
    case 4: attend_fma(c, q, scores, c->D, HALF, is_token); break;
    default: attend_fma(c, q, scores, c->D, QUERIES, is_token);
  }
}

INLINE void attend_item_in_pairs(const Call *c, const Queries *q, int D, int is_token, float *scores) {
  switch (q->count) {
    case 1: attend_pairs(c, q, scores, D, 1, 1); break;
    case 2: attend_pairs(c, q, scores, D, 2, 1); break;
    case 3: attend_pairs(c, q, scores, D, 3, 1); break;
    case 4: attend_pairs(c, q, scores, D, 4, 1); break;
    default:
      if (is_token) attend_pairs(c, q, scores, D, QUERIES, 1);
      else attend_pairs(c, q, scores, D, QUERIES, 0);
  }
}
#endif

INLINE void attend_item_of(const Call *c, const Queries *q, int format, float *scores) {
  if (q->count == 1) attend(c, q, scores, format, 1, 1);
  else attend(c, q, scores, format, QUERIES, 0);
}

INLINE void attend_item_in_bytes(const Call *c, const Queries *q, int is_token, float *scores) {
  if (q->count == 1) attend_bytes(c, q, scores, 0, 1, 1);
  else if (q->count == 2 || TOGETHER == 2)
    for (int i = 0; i < q->count; i += 2) attend_bytes(c, q, scores, i, 2, is_token);
  else if (q->count == 3) attend_bytes(c, q, scores, 0, 3, is_token);
  else if (q->count <= HALF && TOGETHER > HALF) attend_bytes(c, q, scores, 0, HALF, is_token);
  else attend_bytes(c, q, scores, 0, TOGETHER, is_token);
}

static void attend_item(const Call *c, Item item, float *scores) {
  int i = item.sequence, left = item.slots - item.slot, tokens = new_tokens(c, i), first = item.head * c->shared;
  int token = item.slot / c->shared, head = item.slot % c->shared, position = c->context_lens[i] - tokens;
  int hidden = hidden_at(c, position + token) / c->unit * c->unit;  // before all windows, in whole pages
  Queries q = {c->block_tables + (long)i * c->max_pages + hidden / c->P, item.head, left < c->most ? left : c->most, 0,
               hidden / BLOCK, {{0}}};
  for (int s = 0; s < c->most; s++) {
    int at = position + token;
    q.at[s] = s < q.count ? (Query){c->cu_seqlens[i] + token, first + head, at - hidden, hidden_at(c, at) - hidden}
                          : q.at[s - 1];
    if (++head == c->shared) head = 0, token++;
  }
  q.keys = q.at[c->most - 1].position + 1;
#ifdef __AVX512BF16__
  if (takes_pairs(c)) {
    if (c->takes_tiles && q.count > FEW) attend_tiles(c, &q, scores, tokens == 1);
    else if (c->way != DOT) attend_item_in_floats(c, &q, tokens == 1, scores);
    else if (c->D == 64) attend_item_in_pairs(c, &q, 64, tokens == 1, scores);
    else attend_item_in_pairs(c, &q, c->D, tokens == 1, scores);
    return;
  }
#endif
  if (c->format == KV_INT8) attend_item_in_bytes(c, &q, tokens == 1, scores);
  else if (c->format == KV_BF16) attend_item_of(c, &q, KV_BF16, scores);
  else attend_item_of(c, &q, KV_F32, scores);
}

// Refuses rows and pages that would make the loops read or write outside their memory; where entries behind a context
// point is never read, though it may be prefetched.
static int check(const Call *c, int *longest, double *read) {
  if (c->n < 0 || c->cu_seqlens[0] != 0) return BAD_ROWS;
  for (int i = 0; i < c->n; i++) {
    int count = new_tokens(c, i), length = c->context_lens[i];
    if (count < 1 || length < count || (long)length > (long)c->max_pages * c->P) return BAD_ROWS;
    for (int j = 0; j < (length + c->P - 1) / c->P; j++) {
      int page = c->block_tables[(long)i * c->max_pages + j];
      if (page < 0 || page >= c->pages) return BAD_PAGE;
    }
    if (length > *longest) *longest = length;
    *read += (double)count * (c->window && c->window < length ? c->window : length);
  }
  return c->cu_seqlens[c->n] > c->M ? BAD_ROWS : OK;
}

// All pieces of a sequence's queries read its new keys, so where there are several, these are written first, and so is a
// whole page, which other sequences of the step may read.
INLINE int is_written_first(const Call *c, int sequence) {
  int tokens = new_tokens(c, sequence);
  return pieces_of(c, tokens * c->shared) > 1 || tokens >= c->P;
}

static void append_some(void *job, int64_t from, int64_t to, int worker) {
  const Call *c = job;
  for (int a = (int)from; a < to; a++)
    if (is_written_first(c, a / c->KV)) append_new(c, a / c->KV, a % c->KV);
}

// Tiles take denormals for zeros, so what must agree with them to the bit does, too. The thread's mode is as before
// afterwards, and tiles in use would be saved at every task switch.
static unsigned begin_way(const Call *c) {
  unsigned mode = 0;
#ifdef __AVX512BF16__
  mode = _mm_getcsr();
  if (c->way != DOT) _mm_setcsr(mode | FLUSH_DENORMALS);
  if (c->takes_tiles) configure_whole_tiles();
#endif
  return mode;
}

static void end_way(const Call *c, unsigned mode) {
#ifdef __AVX512BF16__
  _mm_setcsr(mode);
  if (c->takes_tiles) release_tiles();
#endif
}

static void attend_some(void *job, int64_t from, int64_t to, int worker) {
  const Call *c = job;
  float *scores = c->scratch + worker * c->stride * c->most;
  unsigned mode = begin_way(c);
  while (from < to) {
    int64_t until = from + APPENDED < to ? from + APPENDED : to;
    Item first = item_at(c, (int)from), item = first;
    // Decode rows append here, a few heads before they read: a load waits for an earlier store to the same line until
    // that is in memory, and this store has 32 lines to fetch.
    for (int64_t a = from; a < until; a++, item = next_item(c, item))
      if (!is_written_first(c, item.sequence)) append_new(c, item.sequence, item.head);
    item = first;
    for (; from < until; from++, item = next_item(c, item)) attend_item(c, item, scores);
  }
  end_way(c, mode);
}

static int step(Call *c) {
  double read = 0;  // keys, once for each query
  int longest = 0, wrong = check(c, &longest, &read), bytes = c->half ? 2 : 4, several = 0;
  if (wrong) return wrong;
  int size = read * c->H * c->D * bytes * 2 < ALONE ? 1 : workers;
  long row = c->format == KV_INT8 ? c->D + SCALE_BYTES : (long)c->D * bytes;
  c->way = takes_pairs(c) ? way : DOT;
  if (c->way == TILES && c->P % 32) c->way = FMA;
  c->most = c->way == TILES ? TILE_QUERIES : QUERIES;
  c->block = BLOCK * row;
  c->per_page = (uint64_t)(c->P / BLOCK);
  c->inverse = (((uint64_t)1 << 32) + c->per_page - 1) / c->per_page;
  c->tile = c->P * row;
  c->unit = c->P % TERMS ? 2 * c->P : c->P;
  c->stride = ((long)longest + 63) / 64 * 64 + 16;  // the 16 keep rows of a power of two out of one cache set
  c->items = malloc(sizeof(int) * ((size_t)c->n + 1));
  size_t room = (size_t)c->stride * c->most * sizeof(float);
  if (!c->items || posix_memalign((void **)&c->scratch, 64, room * size)) {
    free(c->items);
    return NO_MEMORY;
  }
  c->items[0] = 0;
  for (int i = 0; i < c->n; i++) {
    int pieces = pieces_of(c, new_tokens(c, i) * c->shared);
    several += is_written_first(c, i);
    c->takes_tiles |= c->way == TILES && new_tokens(c, i) * c->shared > FEW;
    c->items[i + 1] = c->items[i] + pieces * c->KV;
  }
  int total = c->items[c->n], share = total / (4 * size);
  if (several) share_among(size, append_some, c, (int64_t)c->n * c->KV, 1);
  share_among(size, attend_some, c, total, share < 1 ? 1 : share > APPENDED ? APPENDED : share);
  long C = (long)c->H * c->D, used = c->n ? c->cu_seqlens[c->n] : 0;
  memset(c->out + used * C * bytes, 0, (size_t)(c->M - used) * C * bytes);
  free(c->items);
  free(c->scratch);
  return OK;
}

#define ENTRY(NAME, HALF_WIDTH, FORMAT)                                                                               \
  int NAME(const void *qkv, void *keys, void *values, void *out, const int32_t *cu_seqlens,                           \
           const int32_t *context_lens, const int32_t *block_tables, int n, int M, int H, int KV, int D, int P,       \
           int max_pages, int pages, float scale, int window, float cap, int alibi) {                                 \
    Call c = {.qkv = qkv, .keys = keys, .values = values, .out = out, .cu_seqlens = cu_seqlens,                       \
              .context_lens = context_lens, .block_tables = block_tables, .n = n, .M = M, .H = H, .KV = KV, .D = D,   \
              .P = P, .max_pages = max_pages, .pages = pages, .scale = scale, .window = window, .cap = cap,           \
              .alibi = alibi, .shared = H / KV, .half = HALF_WIDTH, .format = FORMAT};                                \
    return step(&c);                                                                                                  \
  }
ENTRY(paged_attention_f32, 0, KV_F32)
ENTRY(paged_attention_bf16, 1, KV_BF16)
ENTRY(paged_attention_f32_int8, 0, KV_INT8)
ENTRY(paged_attention_bf16_int8, 1, KV_INT8)

int paged_attention_use(int wanted) {
#ifdef __AVX512BF16__
  int possible = wanted != TILES || may_use_tiles();
#else
  int possible = 0;
#endif
  if (possible) way = wanted;
  return possible;
}
