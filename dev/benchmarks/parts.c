// Stands between blocks.c and the kernels that it calls, and adds up the time of each kind.
#include <time.h>

#include "../generate/cpu/kernels.h"

static __typeof__(packed_linear) *linear;
static __typeof__(paged_attention_bf16) *attention;
static double linear_seconds, attention_seconds;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

void parts_of(void *real_linear, void *real_attention) {
  linear = real_linear;
  attention = real_attention;
}

// Returns the seconds since the last call: of linear layers, of attention.
void parts_take(double *seconds) {
  seconds[0] = linear_seconds;
  seconds[1] = attention_seconds;
  linear_seconds = attention_seconds = 0;
}

void timed_linear(const Linear *w, const bf16 *x, const bf16 *residual, void *out, int64_t m, int mode,
                  const Linear *next, const Extra *extra) {
  double began = now();
  linear(w, x, residual, out, m, mode, next, extra);
  linear_seconds += now() - began;
}

int timed_attention(const void *qkv, void *keys, void *values, void *out, const int32_t *cu_seqlens,
                    const int32_t *context_lens, const int32_t *block_tables, int n, int M, int H, int KV, int D,
                    int P, int max_pages, int pages, float scale, int window, float cap, int alibi) {
  double began = now();
  int code = attention(qkv, keys, values, out, cu_seqlens, context_lens, block_tables, n, M, H, KV, D, P, max_pages,
                       pages, scale, window, cap, alibi);
  attention_seconds += now() - began;
  return code;
}
