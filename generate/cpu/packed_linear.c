// Linear layers of the CPU engine in bfloat16: y = activation(x W^T + bias) or x W^T + bias + residual, for any number
// of rows, from one, which memory limits, to hundreds, which arithmetic limits. Sums are float32.
//
// There are two ways. Processors with AMX (Sapphire Rapids and later) multiply tiles of 16 rows, 32 inputs and 16
// outputs, at ten times the arithmetic rate of AVX-512; others multiply pairs of inputs in vectors. A process takes one
// way for all numbers of rows, and the order in which an output is summed depends on that and K alone: not on the
// number of rows, not on threads. So a token's numbers are the same alone and in any batch, bit for bit.
//
// A gated MLP's first layer multiplies activation(gate) and up, halves of one product; its panels hold 16 rows of gate,
// the same 16 of up, and again, so that both sums of an output meet in registers.
//
// Weights W [N, K] are packed once into panels of 64 outputs: [N/64][K/2][64][2], so that a panel is read straight
// through and a pair of inputs meets 64 outputs in four registers, 16 pairs in four tiles. Each panel serves all rows
// while it lies in the second-level cache, and the next one is fetched meanwhile.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels.h"
#include "team.h"

enum { PANEL = 64, ALONE = 1 << 18 };  // multiplications not worth another thread

int packed_linear_supported(void) {
#ifdef __AVX512BF16__
  return 1;
#else
  return 0;
#endif
}

#if defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };  // of arch_prctl
#endif

static int tiles;

int packed_linear_use_tiles(int wanted) {
#ifdef HAS_TILES
  tiles = wanted && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#endif
  return tiles;
}

int64_t packed_linear_size(int64_t n, int64_t k) { return (n + PANEL - 1) / PANEL * PANEL * k; }

typedef struct {
  const bf16 *w;
  bf16 *packed;
  int64_t n, k;
  int gated;
} Packing;

// The row of w that is output `at` of the panels, or n where there is none.
static int64_t packed_row(const Packing *t, int64_t at) {
  if (!t->gated) return at < t->n ? at : t->n;
  int64_t inner = t->n / 2, row = at / 32 * 16 + at % 16;
  return row >= inner ? t->n : at / 16 % 2 ? inner + row : row;
}

static void pack_panels(void *job, int64_t first, int64_t last, int worker) {
  const Packing *t = job;
  for (int64_t p = first; p < last; p++)
    for (int64_t i = 0; i < t->k / 2; i++)
      for (int64_t j = 0; j < PANEL; j++) {
        int64_t row = packed_row(t, p * PANEL + j);
        bf16 *to = t->packed + ((p * (t->k / 2) + i) * PANEL + j) * 2;
        to[0] = row < t->n ? t->w[row * t->k + 2 * i] : 0;
        to[1] = row < t->n ? t->w[row * t->k + 2 * i + 1] : 0;
      }
}

void packed_linear_pack(const bf16 *w, bf16 *packed, int64_t n, int64_t k) {
  Packing t = {w, packed, n, k, 0};
  share_out(pack_panels, &t, (n + PANEL - 1) / PANEL, 1);
}

void packed_linear_pack_gated(const bf16 *w, bf16 *packed, int64_t n, int64_t k) {
  Packing t = {w, packed, n, k, 1};
  share_out(pack_panels, &t, (n + PANEL - 1) / PANEL, 1);
}

#ifdef __AVX512BF16__
#include <immintrin.h>

static inline __m512 widen(const bf16 *p, __mmask16 m) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}

// e^x to 2 units in the last place: 2^n times a polynomial on [-ln2/2, ln2/2]. NaN stays NaN.
static inline __m512 exp16(__m512 x) {
  __m512 lo = _mm512_set1_ps(-87.f), hi = _mm512_set1_ps(88.f);
  __m512 c = _mm512_max_ps(lo, _mm512_min_ps(hi, x));  // min and max return their second operand for a NaN
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(c, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), c);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.f)));
  return _mm512_scalef_ps(p, n);
}

// x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), which is GELU's tanh form.
static inline __m512 gelu16(__m512 x) {
  __m512 x2 = _mm512_mul_ps(x, x);
  __m512 u = _mm512_mul_ps(x, _mm512_fmadd_ps(x2, _mm512_set1_ps(0.0713548162726f), _mm512_set1_ps(1.5957691216057f)));
  __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), u));
  return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1.f)));
}

// x sigmoid(x)
static inline __m512 silu16(__m512 x) {
  __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1.f)));
}

typedef struct {
  const bf16 *x, *packed, *residual;
  const float *bias;
  void *out;
  int64_t m, n, k;
  int mode;
  const bf16 *next;  // the packed weight that is read after this one, or null
  int64_t next_panels, next_k;
  int64_t panels, band;
  int tiles;
} Task;

static inline __mmask16 first_lanes(int64_t count) {
  return count >= 16 ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
}

// 16 sums to outputs col and following of a row.
static inline __attribute__((always_inline)) void put(const Task *t, int64_t row, int64_t col, __m512 sum) {
  int64_t at = row * t->n + col;
  __mmask16 mask = first_lanes(t->n - col);
  __m512 y = t->bias ? _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, t->bias + col)) : sum;
  if (t->mode == FLOAT32) {
    _mm512_mask_storeu_ps((float *)t->out + at, mask, y);
    return;
  }
  if (t->mode == GELU_TANH) y = gelu16(y);
  if (t->residual) y = _mm512_add_ps(y, widen(t->residual + at, mask));
  _mm256_mask_storeu_epi16((bf16 *)t->out + at, mask, (__m256i)_mm512_cvtneps_pbh(y));
}

// 16 sums of gate and of up to products col and following of a row.
static inline __attribute__((always_inline)) void put_gated(const Task *t, int64_t row, int64_t col, __m512 gate,
                                                            __m512 up) {
  int64_t inner = t->n / 2;
  __mmask16 mask = first_lanes(inner - col);
  if (t->bias) {
    gate = _mm512_add_ps(gate, _mm512_maskz_loadu_ps(mask, t->bias + col));
    up = _mm512_add_ps(up, _mm512_maskz_loadu_ps(mask, t->bias + inner + col));
  }
  __m256i y = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(silu16(gate), up));
  _mm256_mask_storeu_epi16((bf16 *)t->out + row * inner + col, mask, y);
}

// The sums of panel p for a row.
static inline __attribute__((always_inline)) void put_panel(const Task *t, int64_t row, int64_t p, __m512 s0, __m512 s1,
                                                            __m512 s2, __m512 s3) {
  if (t->mode == SWIGLU) {
    put_gated(t, row, p * PANEL / 2, s0, s1);
    put_gated(t, row, p * PANEL / 2 + 16, s2, s3);
    return;
  }
  put(t, row, p * PANEL, s0);
  put(t, row, p * PANEL + 16, s1);
  put(t, row, p * PANEL + 32, s2);
  put(t, row, p * PANEL + 48, s3);
}

static inline const char *fetch(const char *from, int lines) {
  for (int l = 0; l < lines; l++) _mm_prefetch(from + 64 * l, _MM_HINT_T1);
  return from + 64 * lines;
}

// R rows from `row` on times one panel. `next` is a stretch of the next panel to fetch, `lines` of it at each pair.
static inline __attribute__((always_inline)) void vector_block(const Task *t, int64_t row, int64_t p, int R,
                                                               const char *next, int lines) {
  const int64_t k = t->k;
  const bf16 *x = t->x + row * k;
  const char *w = (const char *)(t->packed + p * PANEL * k);
  __m512 acc[6][4];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < 4; j++) acc[r][j] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 2) {
    __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 64);
    __m512bh w2 = (__m512bh)_mm512_loadu_si512(w + 128), w3 = (__m512bh)_mm512_loadu_si512(w + 192);
    w += 256;
    next = fetch(next, lines);
    for (int r = 0; r < R; r++) {
      int32_t pair;
      memcpy(&pair, x + r * k + i, 4);
      __m512bh b = (__m512bh)_mm512_set1_epi32(pair);
      acc[r][0] = _mm512_dpbf16_ps(acc[r][0], b, w0);
      acc[r][1] = _mm512_dpbf16_ps(acc[r][1], b, w1);
      acc[r][2] = _mm512_dpbf16_ps(acc[r][2], b, w2);
      acc[r][3] = _mm512_dpbf16_ps(acc[r][3], b, w3);
    }
  }
  for (int r = 0; r < R; r++) put_panel(t, row + r, p, acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
}

// Rows first up to last times panel p; meanwhile `bytes` from `next` on are fetched.
static void vector_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  int64_t blocks = (last - first + 5) / 6;
  int lines = (int)((4 + blocks - 1) / blocks);
  int64_t stretch = t->k / 2 * 64 * lines;
  for (int64_t row = first; row < last; row += 6, next += stretch, bytes -= stretch) {
    int n = bytes >= stretch ? lines : 0;
    switch (last - row) {
      case 1: vector_block(t, row, p, 1, next, n); break;
      case 2: vector_block(t, row, p, 2, next, n); break;
      case 3: vector_block(t, row, p, 3, next, n); break;
      case 4: vector_block(t, row, p, 4, next, n); break;
      case 5: vector_block(t, row, p, 5, next, n); break;
      default: vector_block(t, row, p, 6, next, n);
    }
  }
}

#ifdef HAS_TILES
enum { ROWS = 16 };  // of a tile

// Tiles 0-3 hold sums, 4 holds rows of x, all there are or 16, 5-7 weights: 16 pairs of inputs by 16 outputs.
static void configure_tiles(int64_t m) {
  uint8_t rows = m < ROWS ? (uint8_t)m : ROWS;
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {rows, rows, rows, rows, rows, ROWS, ROWS, ROWS}};
  __asm__ volatile("" : : "r"(&config) : "memory");  // the intrinsic declares that it reads only the first bytes
  _tile_loadconfig(&config);
}

// As vector_panel. Fetches are spread between the tiles, which would otherwise wait for them. All blocks have 16 rows
// if there are that many: the last begins within the one before it.
static void tile_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {
  const int64_t k = t->k, blocks = (last - first + ROWS - 1) / ROWS;
  const int lines = (int)((4 + blocks - 1) / blocks);  // at each pair, as in vector_panel: 4 times that for each tile
  const int64_t stretch = k / 2 * 64 * lines;
  float sums[ROWS][PANEL] __attribute__((aligned(64)));
  for (int64_t row = first; row < last; row += ROWS, next += stretch, bytes -= stretch) {
    int64_t top = t->m < ROWS ? 0 : row < t->m - ROWS ? row : t->m - ROWS, end = row + ROWS < last ? row + ROWS : last;
    const bf16 *x = t->x + top * k;
    const char *w = (const char *)(t->packed + p * PANEL * k), *ahead = next;
    int n = bytes >= stretch ? 4 * lines : 0;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < k; i += 32, w += 4096) {
      _tile_loadd(4, x + i, 2 * k);
      _tile_loadd(5, w, 256);
      _tile_dpbf16ps(0, 4, 5);
      ahead = fetch(ahead, n);
      _tile_loadd(6, w + 64, 256);
      _tile_dpbf16ps(1, 4, 6);
      ahead = fetch(ahead, n);
      _tile_loadd(7, w + 128, 256);
      _tile_dpbf16ps(2, 4, 7);
      ahead = fetch(ahead, n);
      _tile_loadd(5, w + 192, 256);
      _tile_dpbf16ps(3, 4, 5);
      ahead = fetch(ahead, n);
    }
    _tile_stored(0, &sums[0][0], sizeof sums[0]);
    _tile_stored(1, &sums[0][16], sizeof sums[0]);
    _tile_stored(2, &sums[0][32], sizeof sums[0]);
    _tile_stored(3, &sums[0][48], sizeof sums[0]);
    for (int64_t r = row; r < end; r++) {
      const float *s = sums[r - top];
      put_panel(t, r, p, _mm512_load_ps(s), _mm512_load_ps(s + 16), _mm512_load_ps(s + 32), _mm512_load_ps(s + 48));
    }
  }
}
#else
static void configure_tiles(int64_t m) {}
static void tile_panel(const Task *t, int64_t p, int64_t first, int64_t last, const char *next, int64_t bytes) {}
#define _tile_release() (void)0
#endif

static void panels_of_bands(void *job, int64_t from, int64_t to, int worker) {
  const Task *t = job;
  int64_t bands = (t->m + t->band - 1) / t->band, end = share_end(t->panels * bands, worker, workers);
  if (t->tiles) configure_tiles(t->m);
  for (int64_t i = from; i < to; i++) {
    int64_t p = i % t->panels, first = i / t->panels * t->band, last = first + t->band < t->m ? first + t->band : t->m;
    const bf16 *next = t->packed + (p + 1) * PANEL * t->k;
    int64_t bytes = p + 1 < t->panels ? PANEL * t->k * 2 : 0;
    if (i + 1 == end) {  // the worker's share is done: on to where its share of the next weight begins
      next = t->next + share_end(t->next_panels, worker - 1, workers) * PANEL * t->next_k;
      bytes = t->next ? PANEL * t->next_k * 2 : 0;
    }
    (t->tiles ? tile_panel : vector_panel)(t, p, first, last, (const char *)next, bytes);
  }
  if (t->tiles) _tile_release();  // tiles in use are saved at every task switch
}

// Rows beyond some hundreds are cut into bands, so that many cores find work in few panels.
void packed_linear(const bf16 *x, const bf16 *packed, const float *bias, const bf16 *residual, void *out, int64_t m,
                   int64_t n, int64_t k, int mode, const bf16 *next, int64_t next_n, int64_t next_k) {
  Task t = {x, packed, residual, bias, out, m, n, k, mode, next, (next_n + PANEL - 1) / PANEL, next_k,
            (n + PANEL - 1) / PANEL, 192, tiles && k % 32 == 0};
  int64_t items = t.panels * ((m + t.band - 1) / t.band), each = items / (2 * workers);
  if (m * n * k < ALONE) alone(panels_of_bands, &t, items, items);
  else share_out(panels_of_bands, &t, items, each < 1 ? 1 : each > 4 ? 4 : each);
}
#else
void packed_linear(const bf16 *x, const bf16 *packed, const float *bias, const bf16 *residual, void *out, int64_t m,
                   int64_t n, int64_t k, int mode, const bf16 *next, int64_t next_n, int64_t next_k) {}
#endif
