// The peak rate of each instruction that the kernels of generate/cpu multiply with: products of registers alone, on all
// threads. A function returns how many operations it did, a multiplication and an addition being two, or 0 where the
// processor lacks the instruction.
#include "../generate/cpu/bytes.h"
#include "../generate/cpu/tiles.h"

#if LANES == 8
enum { SUMS = 12 };  // independent ones, so that no instruction waits for another; they and two operands fit the registers
#else
enum { SUMS = 24 };
#endif

#if defined(__x86_64__)
#define KEEP(x) __asm__ volatile("" : "+v"(x))  // else the compiler would compute a product once
#elif defined(__aarch64__)
#define KEEP(x) __asm__ volatile("" : "+w"(x))
#else
#define KEEP(x) __asm__ volatile("" : "+m"(x))
#endif

#define PEAK(name, type, product, operations)                              \
  int64_t name(int64_t rounds, int threads) {                              \
    _Pragma("omp parallel num_threads(threads)") {                         \
      type sums[SUMS], w = {0}, x = {0};                                   \
      UNROLL for (int j = 0; j < SUMS; j++) sums[j] = (type){0};           \
      KEEP(w);                                                             \
      for (int64_t i = 0; i < rounds; i++)                                 \
        UNROLL for (int j = 0; j < SUMS; j++) {                            \
          KEEP(x);                                                         \
          sums[j] = product(sums[j], w, x);                                \
          KEEP(sums[j]);                                                   \
        }                                                                  \
    }                                                                      \
    return rounds * SUMS * (operations) * threads;                         \
  }

INLINE vec add_product(vec sum, vec w, vec x) { return fused(w, x, sum); }
PEAK(peak_fma, vec, add_product, 2 * LANES)
PEAK(peak_bytes, ivec, dot, 8 * LANES)
PEAK(peak_small_bytes, ivec, dot_small, 8 * LANES)

#ifdef __AVX512BF16__
INLINE vec add_pairs(vec sum, vec w, vec x) {
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
}
PEAK(peak_dot, vec, add_pairs, 4 * LANES)
#else
int64_t peak_dot(int64_t rounds, int threads) { return 0; }
#endif

#define TILES_PEAK(name, instruction, inputs)                              \
  int64_t name(int64_t rounds, int threads) {                              \
    if (!may_use_tiles()) return 0;                                        \
    _Pragma("omp parallel num_threads(threads)") {                         \
      configure_whole_tiles();                                             \
      _tile_zero(0), _tile_zero(1), _tile_zero(2), _tile_zero(3);          \
      _tile_zero(4), _tile_zero(5), _tile_zero(6), _tile_zero(7);          \
      for (int64_t i = 0; i < rounds; i++) {                               \
        instruction(0, 4, 6);                                              \
        instruction(1, 4, 7);                                              \
        instruction(2, 5, 6);                                              \
        instruction(3, 5, 7);                                              \
      }                                                                    \
      release_tiles();                                                     \
    }                                                                      \
    return rounds * 4 * 2 * TILE_ROWS * TILE_ROWS * (inputs) * threads;    \
  }

#if HAS_TILES
TILES_PEAK(peak_tiles, _tile_dpbf16ps, 32)
#else
int64_t peak_tiles(int64_t rounds, int threads) { return 0; }
#endif

#if HAS_INT8_TILES
TILES_PEAK(peak_byte_tiles, _tile_dpbssd, 64)
#else
int64_t peak_byte_tiles(int64_t rounds, int threads) { return 0; }
#endif
