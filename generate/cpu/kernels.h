// The functions that Python calls and the structs that it fills, each declared once. The C files include this header,
// so the compiler compares their definitions with it, and generate/cpu/declarations.py reads it for ctypes. That reader
// knows prototypes, structs, and enums with numbers, in the form that they have here.
//
// The layers of the machine, each of which includes only those below it:
//
//   a step            blocks.c, in one call; it calls the kernels by address
//   kernels           packed_linear.c    paged_attention.c                    adapters.c    sampler.c
//   number formats    linear_bf16.h      attention_bf16.h, attention_any.h
//                     linear_int8.h      attention_int8.h
//                     linear_blocks.h
//   ways to multiply  linear_dot.h       attention_fma.h
//                     int8_tiles.h       attention_tiles.h
//                     blocks_tiles.h
//   what these share  panels.h, quantized.h, blocks_format.h    attention_call.h
//   instructions      bytes.h (products of bytes), tiles.h (AMX), vectors.h (registers of any width)
//   threads           team.h, team.c
#pragma once
#include <stdint.h>

typedef uint16_t bf16;

// paged_attention.c

enum { MAX_HEAD_SIZE = 256, PAGE_MULTIPLE = 16, SCALE_BYTES = 4 };
enum { OK = 0, BAD_ROWS = 1, BAD_PAGE = 2, NO_MEMORY = 3 };

// qkv [M, (H + 2*KV)*D] and out [M, H*D] contiguous, H a multiple of KV, pools [pages, KV, P, D] contiguous, cu_seqlens
// [n+1], context_lens [n], block_tables [n, max_pages]. Rows behind cu_seqlens[n] are padding and come out as zeros.
// A token at position p sees keys p-window+1..p, or 0..p for window 0; pages that lie 2 P tokens before them may hold
// anything. With a cap, scores x become cap * tanh(x / cap). alibi: 0, or how many heads have the slopes 2^(-8 h / alibi)
// by which their scores then fall with each token of distance; the others' lie between. Returns OK or a code above.
int paged_attention_f32(const void *qkv, void *keys, void *values, void *out, const int32_t *cu_seqlens,
                        const int32_t *context_lens, const int32_t *block_tables, int n, int M, int H, int KV, int D,
                        int P, int max_pages, int pages, float scale, int window, float cap, int alibi);
int paged_attention_bf16(const void *qkv, void *keys, void *values, void *out, const int32_t *cu_seqlens,
                         const int32_t *context_lens, const int32_t *block_tables, int n, int M, int H, int KV, int D,
                         int P, int max_pages, int pages, float scale, int window, float cap, int alibi);
// The same for 8-bit pools [pages, KV, P, D + SCALE_BYTES], with a scale for each token and head of keys.
int paged_attention_f32_int8(const void *qkv, void *keys, void *values, void *out, const int32_t *cu_seqlens,
                             const int32_t *context_lens, const int32_t *block_tables, int n, int M, int H, int KV,
                             int D, int P, int max_pages, int pages, float scale, int window, float cap, int alibi);
int paged_attention_bf16_int8(const void *qkv, void *keys, void *values, void *out, const int32_t *cu_seqlens,
                              const int32_t *context_lens, const int32_t *block_tables, int n, int M, int H, int KV,
                              int D, int P, int max_pages, int pages, float scale, int window, float cap, int alibi);
// Sets the way of bfloat16 heads of a multiple of 64 from here on and returns 1, or 0 where the processor or the system
// refuses it: it stays as it was then.
int paged_attention_use(int way);

// packed_linear.c

enum { PLAIN = 0, GELU_TANH = 1, FLOAT32 = 2, SWIGLU = 3, GELU_ERF = 4 };  // modes of packed_linear
// Formats of weights; the last three are GGUF's.
enum { BFLOAT16 = 0, INT8 = 1, Q4_0 = 2, Q4_1 = 3, Q8_0 = 4 };
enum { FMA = 0, DOT = 1, TILES = 2 };                        // ways to multiply bfloat16, see linear_bf16.h

typedef struct {
  const void *packed;  // from packed_linear_pack
  const float *bias;   // [n] or null
  int64_t n, k;
  int format;
} Linear;

// What is added to some rows of a product before its activation: sums [rows, n], of_row [m] the row of `sums`, or -1.
typedef struct {
  const float *sums;
  const int32_t *of_row;
} Extra;

// Returns 1 where packed_linear runs for a format, else 0: the caller then uses another way.
int packed_linear_supported(int format);
// Returns 1 where linear layers can take this way. The system must permit a process to have tiles.
int packed_linear_has(int way);
// Sets the way of all linear layers with bfloat16 weights from here on and returns 1, or 0 where they cannot take it:
// it stays as it was then.
int packed_linear_use(int way);
// Returns the number of bytes that packed_linear_pack writes.
int64_t packed_linear_bytes(int format, int64_t n, int64_t k);
// Packs w [n, k], bfloat16 or rows of blocks, into panels; for BFLOAT16 k is even, for others w is finite. Outputs that
// fill the last panel are zero. gated, for mode SWIGLU: w has n / 2 rows of the gate, then n / 2 of the up projection.
void packed_linear_pack(int format, const void *w, void *packed, int64_t n, int64_t k, int gated);
// x [m, k], residual [m, n] or null, out [m, n] bfloat16, or float32 in mode FLOAT32, or in mode SWIGLU the n / 2
// products silu(gate) * up, which take no residual. next: the weight that is needed after this one, or null. extra: what
// is added to some rows, or null; the bits of the others do not depend on it.
void packed_linear(const Linear *w, const bf16 *x, const bf16 *residual, void *out, int64_t m, int mode,
                   const Linear *next, const Extra *extra);

// adapters.c

enum { LOW_RANK_INPUTS = 16, LOW_RANK_STEP = 4, LOW_RANK_PANEL = 64 };

// What an adapter makes of `rank` sums from `first` on: outputs start..start+count. b in panels [count / 64][rank][64].
typedef struct {
  const void *b;
  int64_t start, count, first, rank;
} Up;

// What an adapter adds to one linear layer: a [rank, k filled up to LOW_RANK_INPUTS], rank a multiple of LOW_RANK_STEP,
// or 0 if it adds nothing; ups: Up [n_ups].
typedef struct {
  const void *a, *ups;
  int64_t rank, n_ups;
} LowRank;

// The rows of a step that have an adapter, those of one after the other: group g has rows begin[g]..begin[g+1].
// tables: for each group, LowRank [layers * 4] of its adapter.
typedef struct {
  const int32_t *row;     // [rows] of the step
  const int32_t *of_row;  // [m], see Extra
  const int64_t *begin;   // [groups + 1]
  const void **tables;    // [groups]
  float *middle;          // [rows, most_rank]
  float *sums;            // [rows, most outputs of a layer]
  int64_t rows, groups, most_rank;
} Adapters;

// x [m, k], float32 if `wide`, else bfloat16, as the adapters' numbers. Returns 0 if no adapter adds anything in this
// place of its table, else 1 with `sums` [rows, n] filled.
int low_rank(const Adapters *adapters, int64_t place, const void *x, int64_t k, int64_t n, int wide);

// blocks.c

// Norms are float32: weight [C], then bias [C] unless the norm is an RMS norm.
typedef struct {
  const float *norm_1, *norm_2;
  const float *q_norm, *k_norm;  // RMS norms before the rotation, or null: of each head, weight [D], or of all together
  Linear qkv, attn_proj, fc, mlp_proj;
  void *keys, *values;
  float scale;
  int turns;   // queries and keys are rotated
  int window, alibi;  // of attention, or 0
} Block;

typedef struct {
  __typeof__(packed_linear) *linear;
  __typeof__(paged_attention_bf16) *attention;
  __typeof__(low_rank) *low_rank;  // null until a step has adapters
  const bf16 *embedding;  // [V, C]
  const bf16 *positions;  // [T, C], or null
  const float *rotation;  // cosine and sine of every angle, [T, 2, D/2], or null; then D is even
  const float *norm, *embedding_norm;  // the second may be null
  float eps;
  int rms;                // norms are RMS norms, else layer norms
  int norm_after;         // of what attention and MLP give, not of what they take
  int parallel;           // attention and MLP take the same residual
  int whole_qk_norm;      // q_norm and k_norm are over all heads
  int mlp_mode;           // of packed_linear for fc: a GELU, or SWIGLU
  int heads, kv_heads, head_size, page_size, pages;
  int64_t width;          // C
} Model;

// ids, positions [m]; sample_rows [n_samples]: the rows to norm into out [n_samples, C], null for all in order. work
// has m * (C + max(C, H*D) + max((H + 2*KV)*D, inputs of mlp_proj, C)) elements, if `parallel` m * C more. adapters: of
// some rows, or null. Returns attention's code; unless that is OK, out is undefined.
int run_blocks(const Model *model, const Block *blocks, int n_blocks, const int64_t *ids, const int64_t *positions,
               int64_t m, const int64_t *sample_rows, int64_t n_samples, bf16 *out, bf16 *work,
               const int32_t *cu_seqlens, const int32_t *context_lens, const int32_t *block_tables, int n,
               int max_pages, const Adapters *adapters);

// sampler.c

enum { MAX_LOGITS = 1048576 };

// logits [rows, n], n at most MAX_LOGITS; inverse_temperature [rows], 0 for greedy; positions [rows], that of the new
// token in its context. masks: NULL, or for each row the address of its mask, 0 for none: bit i % 32 of word i / 32 says
// whether token i may follow. out[i] is the token, -1 where the row is not finite, or -2 where its mask allows nothing.
// Of equal logits, greedy takes the lowest id.
void sample_tokens(const float *logits, int64_t rows, int64_t n, const float *inverse_temperature,
                   const uint64_t *seeds, const int64_t *positions, const int64_t *masks, int64_t *out);

// team.c

// Starts a team of `size` workers, the caller of team_run among them; helpers spin for `patience_us` before they sleep.
// Returns how many there are: fewer where the system gives no more threads, more where more were started before.
int team_start(int size, int patience_us);
int openmp_start(int size);
