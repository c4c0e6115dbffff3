/* Tiles of AMX: 16 rows of 64 bytes. A product adds to 16 x 16 floats what 16 rows of 32 bfloat16 give with 16 columns of
   pairs in k. EMULATE_TILES plays the same in C, in the order that Intel's manual gives for TDPBF16PS: the even and the
   odd k are one chain of fused multiply-adds each, from zero; then their sum is added. Denormal numbers count as zero
   throughout. Without either there are no tiles. */
#pragma once
#include "vec.h"

enum { TILE_ROWS = 16, TILE_K = 32, TILE_COLUMNS = 16, LINE = 64 };

#if defined(EMULATE_TILES)
#define HAS_TILES 1

typedef struct { float number[TILE_ROWS][TILE_COLUMNS]; } Tile16;
static _Thread_local Tile16 tiles[8];

INLINE i64 tiles_allowed(void) { return 1; }
INLINE void tiles_begin(void) {}
INLINE void tiles_end(void) {}

INLINE void tile_zero_at(int t) { memset(&tiles[t], 0, sizeof tiles[t]); }

INLINE void tile_load_at(int t, const void *from, i64 step)
{
    for (int r = 0; r < TILE_ROWS; r++) memcpy(tiles[t].number[r], (const char *)from + r * step, LINE);
}

INLINE void tile_store_at(int t, void *to, i64 step)
{
    for (int r = 0; r < TILE_ROWS; r++) memcpy((char *)to + r * step, tiles[t].number[r], LINE);
}

INLINE float without_denormal(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0, x) : x; }

INLINE float tile_element(uint32_t word, int odd)
{
    uint32_t bits = odd ? word & 0xffff0000u : word << 16;
    float number;
    memcpy(&number, &bits, 4);
    return without_denormal(number);
}

static __attribute__((noinline)) void tile_product_at(int sums, int rows, int columns)
{
    uint32_t a[TILE_ROWS][TILE_COLUMNS], b[TILE_ROWS][TILE_COLUMNS];
    memcpy(a, &tiles[rows], sizeof a), memcpy(b, &tiles[columns], sizeof b);
    for (int r = 0; r < TILE_ROWS; r++) {
        float half[2][TILE_COLUMNS] = {};
        for (int odd = 0; odd < 2; odd++)
            for (int pair = 0; pair < TILE_K / 2; pair++) {
                float x = tile_element(a[r][pair], odd);
                for (int c = 0; c < TILE_COLUMNS; c++)
                    half[odd][c] = without_denormal(__builtin_fmaf(x, tile_element(b[pair][c], odd), half[odd][c]));
            }
        for (int c = 0; c < TILE_COLUMNS; c++) {
            float *sum = &tiles[sums].number[r][c];
            *sum = without_denormal(without_denormal(*sum) + without_denormal(half[0][c] + half[1][c]));
        }
    }
}
#define TILE_ZERO(t) tile_zero_at(t)
#define TILE_LOAD(t, from, step) tile_load_at(t, from, step)
#define TILE_STORE(t, to, step) tile_store_at(t, to, step)
#define TILE_PRODUCT(sums, rows, columns) tile_product_at(sums, rows, columns)

#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__) && defined(__AVX512F__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

/* Asks the system for the registers, for all threads of the process and its children. */
INLINE i64 tiles_allowed(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

/* Every tile is full. A thread that has begun must end, or each switch of threads saves 8 KB. */
INLINE void tiles_begin(void)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int t = 0; t < 8; t++) shape.row_bytes[t] = LINE, shape.rows[t] = TILE_ROWS;
    _tile_loadconfig(&shape);
}

INLINE void tiles_end(void) { _tile_release(); }
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, from, step) _tile_loadd(t, from, step)
#define TILE_STORE(t, to, step) _tile_stored(t, to, step)
#define TILE_PRODUCT(sums, rows, columns) _tile_dpbf16ps(sums, rows, columns)

#else
#define HAS_TILES 0
INLINE i64 tiles_allowed(void) { return 0; }
INLINE void tiles_begin(void) {}
INLINE void tiles_end(void) {}
#define TILE_ZERO(t) (void)0
#define TILE_LOAD(t, from, step) (void)0
#define TILE_STORE(t, to, step) (void)0
#define TILE_PRODUCT(sums, rows, columns) (void)0
#endif
