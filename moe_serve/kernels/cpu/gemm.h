/* x W^T of some rows and one panel of a packed weight.

   W [n, k] lies in panels of 64 columns of W^T, [panel][k][64]; n is padded to a multiple of 32, and the last panel is
   32 wide where that is enough. In bfloat16 a word of 32 bits holds columns c and c + 16 of each 32. So the layout does
   not depend on the width of a register. Every output is one chain of fused multiply-adds in order of k, whatever the
   tile, blocking, thread or machine: its bits depend on its row of x and its column of W only. */
#pragma once
#include "vec.h"

enum { FLOAT32, BFLOAT16 };
enum { PANEL = 64, MOST_ROWS = 6, K_BLOCK = 512, PREFETCH = 4096 /* bytes ahead */ };

INLINE i64 bytes_of(i64 kind) { return kind == FLOAT32 ? 4 : 2; }
INLINE i64 num_panels(i64 n) { return (n + PANEL - 1) / PANEL; }
INLINE i64 panel_width(i64 n, i64 panel) { return n - panel * PANEL > 32 ? 64 : 32; }

INLINE const char *panel_at(const void *w, i64 panel, i64 k, i64 kind)
{
    return (const char *)w + panel * k * PANEL * bytes_of(kind);
}

/* The column of register v in a tile that begins at column `first` of the panel, and the weights there at one k. */
INLINE i64 column_of(const int kind, i64 first, int v)
{
    if (kind != BFLOAT16) return first + v * VL;
    i64 words = first / 2 + v / 2 * VL; /* a tile begins where a vector of words does */
    return words / 16 * 32 + words % 16 + v % 2 * 16;
}

INLINE void load_weights(const int V, const int kind, const char *w, i64 first, vf *b)
{
    UNROLL for (int v = 0; v < V; v++)
        if (kind == FLOAT32) b[v] = *(const vf *)((const float *)w + first + v * VL);
        else {
            vu both = *(const vu *)((const uint16_t *)w + first + v / 2 * 2 * VL);
            b[v] = v % 2 ? (vf)(both & 0xffff0000u) : (vf)(both << 16);
        }
}

typedef struct {
    const float *x[MOST_ROWS];
    float *y[MOST_ROWS]; /* the first column of the panel */
    const char *w;       /* the first k of the panel */
    i64 width, k;
    i64 more; /* goes on from what is in y */
} Tile;

/* R rows by V registers from column `first` on. */
INLINE void tile(const int R, const int V, const int kind, const Tile *t, i64 first)
{
    vf acc[MOST_ROWS][8]; /* of constant size, and every loop over it unrolled: it lives in registers */
    const float *x[MOST_ROWS];
    const char *w = t->w;
    i64 step = t->width * bytes_of(kind);
    UNROLL for (int r = 0; r < R; r++) {
        x[r] = t->x[r];
        UNROLL for (int v = 0; v < V; v++)
            acc[r][v] = t->more ? *(const vf *)(t->y[r] + column_of(kind, first, v)) : (vf){};
    }
    for (i64 i = 0; i < t->k; i++, w += step) {
        vf b[8];
        load_weights(V, kind, w, first, b);
        UNROLL for (int line = 0; line < V * VL * bytes_of(kind); line += 64)
            __builtin_prefetch(w + PREFETCH + first * bytes_of(kind) + line);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) acc[r][v] += x[r][i] * b[v];
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) *(vf *)(t->y[r] + column_of(kind, first, v)) = acc[r][v];
}

#if defined(__AVX512F__)
#define WIDEST(R) 4 /* of 32 registers */
#elif defined(__aarch64__)
#define WIDEST(R) ((R) <= 3 ? 8 : 4) /* of 32 registers, of 4 floats each */
#else
#define WIDEST(R) ((R) == 1 ? 8 : (R) <= 3 ? 4 : 2) /* of 16 registers */
#endif
#define V_OF(R, WIDTH) (WIDEST(R) * VL > (WIDTH) ? (WIDTH) / VL : WIDEST(R))
#define TILES(R, WIDTH)                                                                                               \
    case R:                                                                                                           \
        for (i64 first = 0; first < WIDTH; first += V_OF(R, WIDTH) * VL) tile(R, V_OF(R, WIDTH), kind, t, first);      \
        break;
#define ALL_TILES(WIDTH) TILES(1, WIDTH) TILES(2, WIDTH) TILES(3, WIDTH) TILES(4, WIDTH) TILES(5, WIDTH) TILES(6, WIDTH)

/* Up to MOST_ROWS rows. Not inlined: one copy for each kind. */
#define ROWS_BY_PANEL(name, KIND)                                                                                     \
    static __attribute__((noinline)) void name(const Tile *t, i64 rows)                                               \
    {                                                                                                                 \
        const int kind = KIND;                                                                                        \
        if (t->width == PANEL) switch (rows) { ALL_TILES(64) }                                                        \
        else switch (rows) { ALL_TILES(32) }                                                                          \
    }
ROWS_BY_PANEL(rows_float32, FLOAT32)
ROWS_BY_PANEL(rows_bfloat16, BFLOAT16)

/* y[r][0 .. width) = x[r] W^T for any number of rows. The panel comes from memory once: in blocks of k that stay in L2. */
static void panel_product(i64 kind, const float *const *x, i64 rows, const char *w, i64 width, i64 k, float *const *y)
{
    i64 blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    if (!k)
        for (i64 r = 0; r < rows; r++) memset(y[r], 0, width * 4);
    for (i64 start = 0; start < k; start += K_BLOCK)
        for (i64 b = 0; b < blocks; b++) {
            i64 from = rows * b / blocks, count = rows * (b + 1) / blocks - from;
            Tile t = {.w = w + start * width * bytes_of(kind), .width = width, .k = least(K_BLOCK, k - start), .more = start};
            for (i64 r = 0; r < count; r++) t.x[r] = x[from + r] + start, t.y[r] = y[from + r];
            (kind == FLOAT32 ? rows_float32 : rows_bfloat16)(&t, count);
        }
}
