// AMX's tiles: whether a process may use them, and how many rows and bytes each has.
#pragma once
#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

enum { ASK_PERMISSION = 0x1023, TILE_DATA = 18 };  // of arch_prctl
enum { TILE_ROWS = 16, TILE_BYTES = 64 };          // of a whole tile: bytes in a row
#define WHOLE {TILE_ROWS, TILE_BYTES}

typedef struct {
  uint8_t rows, bytes;
} Tile;

// Tiles without the system's permission are an illegal instruction.
static int may_use_tiles(void) { return syscall(SYS_arch_prctl, ASK_PERMISSION, TILE_DATA) == 0; }

INLINE void configure_tiles(const Tile tiles[8]) {
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {.palette = 1};
  for (int i = 0; i < 8; i++) config.bytes[i] = tiles[i].bytes, config.rows[i] = tiles[i].rows;
  __asm__ volatile("" : : "r"(&config) : "memory");  // the intrinsic declares that it reads only the first bytes
  _tile_loadconfig(&config);
}

static void configure_whole_tiles(void) {
  configure_tiles((const Tile[8]){WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE});
}

static void release_tiles(void) { _tile_release(); }  // tiles in use are saved at every task switch
#else
#define HAS_TILES 0
static int may_use_tiles(void) { return 0; }
static void configure_whole_tiles(void) {}
static void release_tiles(void) {}
#endif

#if HAS_TILES && defined(__AMX_INT8__)
#define HAS_INT8_TILES 1
#else
#define HAS_INT8_TILES 0
#endif
