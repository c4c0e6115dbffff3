/* x W^T of some rows and one panel of a packed weight.

   W [n, k] lies in panels of 64 columns of W^T, [panel][k][64]; n is padded to a multiple of 32, and the last panel is
   32 wide where that is enough; k is padded to an even number. In bfloat16 a word of 32 bits holds k and k + 1 of a
   column, [panel][k / 2][64][2]; in MXFP4 a byte does, k in its lower half, and the scales' exponents lie as a weight of
   bytes [n, k / 32] does. So the layout does not depend on the width of a register. Every output is one chain of
   fused multiply-adds in order of k, whatever the tile, blocking, thread or machine: its bits depend on its row of x
   and its column of W only. */
#pragma once
#include "weights.h"

enum { MOST_ROWS = 6, K_BLOCK = 512, PREFETCH = 8192 /* bytes ahead */ };

/* How a tile reads its weights: from memory, fetching the line 8 KB ahead into the second cache, since the first one
   would drop what is read now for lines a multiple of 4 KB ahead; the same for the first of several blocks of
   rows, keeping what it widened; as float32, from what was kept or from the cache. */
enum { DIRECT, KEEP, AGAIN };

/* One panel of a packed weight. */
typedef struct {
    i64 kind, width, k;
    const char *w;
    const float *scale[2];    /* E4M3 in blocks: of the first and the last 32 columns, one for every 128 of k */
    const float *channels;    /* E4M3 by channel: of each column, times E4M3_UNIT */
    const uint8_t *exponents; /* MXFP4 only: of the scales, [k / 32][width] */
    char *wide;               /* MXFP4 by tiles: room for the panel in bfloat16, for many rows */
} Panel;

/* Some rows of x, and where their products go. */
typedef struct {
    i64 rows;
    const float *const *x; /* [rows], where the rows are not packed */
    const float *packed;   /* [k / block][rows / 6][block][6], see pack_rows; or 0 */
    float *const *y;       /* [rows], each at the first column of the panel */
} Rows;

/* Up to 6 rows, one panel, one block of k. */
typedef struct {
    const float *x[MOST_ROWS];
    float *y[MOST_ROWS];
    const char *w;
    const float *scale; /* see load_weights, [width]; MXFP4: [k / 32][width] */
    float *wide;       /* [k][width], see KEEP */
    const char *ahead; /* what is fetched into the cache on the way, ahead_step bytes with every k; not in DIRECT */
    i64 ahead_step, x_step, width, k;
    i64 more; /* goes on from what is in y */
} Tile;

/* R rows by V registers from column `first` on. */
INLINE void tile(const int R, const int V, const int kind, const int way, const Tile *t, i64 first)
{
    const int word = word_bytes(kind), pairs = k_per_word(kind) == 2;
    vf acc[MOST_ROWS][8]; /* of constant size, and every loop over it unrolled: it lives in registers */
    const float *x[MOST_ROWS];
    const char *w = t->w, *ahead = t->ahead;
    const float *scale = t->scale;
    float *wide = t->wide;
    i64 step = t->width * word, x_step = t->x_step, ahead_step = t->ahead_step;
    UNROLL for (int r = 0; r < R; r++) {
        x[r] = t->x[r];
        UNROLL for (int v = 0; v < V; v++) acc[r][v] = t->more ? *(const vf *)(t->y[r] + first + v * VL) : (vf){};
    }
    for (i64 i = 0, at = 0; i < t->k; i++, at += x_step) {
        vf b[8];
        i64 second = pairs && i % 2;
        load_weights(V, kind, second, w, first, scale, b);
        if (way == DIRECT && !second) {
            UNROLL for (int line = 0; line < V * VL * word; line += 64)
                __builtin_prefetch(w + PREFETCH + first * word + line, 0, 2);
        } else if (way != DIRECT) {
            const char *line = ahead;
            ahead += ahead_step;
            for (; line < ahead; line += 64) __builtin_prefetch(line, 0, 2);
        }
        if (!pairs || second) w += step;
        if (kind == MXFP4 && i % MX_BLOCK == MX_BLOCK - 1) scale += t->width;
        if (way == KEEP) {
            UNROLL for (int v = 0; v < V; v++) *(vf *)(wide + first + v * VL) = b[v];
            wide += t->width;
        }
        UNROLL for (int r = 0; r < R; r++) {
            vf a = splat(x[r][at]);
            UNROLL for (int v = 0; v < V; v++) add_product(&acc[r][v], a, b[v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) *(vf *)(t->y[r] + first + v * VL) = acc[r][v];
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
        for (i64 first = 0; first < WIDTH; first += V_OF(R, WIDTH) * VL)                                              \
            tile(R, V_OF(R, WIDTH), kind, way, t, first);                                                             \
        break;
#define MORE_TILES(WIDTH) TILES(3, WIDTH) TILES(4, WIDTH) TILES(5, WIDTH) TILES(6, WIDTH)
#define ALL_TILES(WIDTH) TILES(1, WIDTH) TILES(2, WIDTH) MORE_TILES(WIDTH)

/* Not inlined: one copy for each kind and way. Several blocks of rows have 3 rows or more each, being cut evenly. */
#define ROWS_BY_PANEL(name, KIND, WAY, TILES_64, TILES_32)                                                            \
    static __attribute__((noinline)) void name(const Tile *t, i64 rows)                                               \
    {                                                                                                                 \
        const int kind = KIND, way = WAY;                                                                             \
        if (t->width == PANEL) switch (rows) { TILES_64(64) }                                                         \
        else switch (rows) { TILES_32(32) }                                                                           \
    }
#define NO_TILES(WIDTH)
ROWS_BY_PANEL(float32_direct, FLOAT32, DIRECT, ALL_TILES, ALL_TILES)
ROWS_BY_PANEL(bfloat16_direct, BFLOAT16, DIRECT, ALL_TILES, ALL_TILES)
ROWS_BY_PANEL(int8_direct, INT8, DIRECT, ALL_TILES, ALL_TILES)
ROWS_BY_PANEL(e4m3_direct, E4M3, DIRECT, ALL_TILES, ALL_TILES)
ROWS_BY_PANEL(mxfp4_direct, MXFP4, DIRECT, ALL_TILES, ALL_TILES)
ROWS_BY_PANEL(bfloat16_keep, BFLOAT16, KEEP, MORE_TILES, NO_TILES)
ROWS_BY_PANEL(int8_keep, INT8, KEEP, MORE_TILES, NO_TILES)
ROWS_BY_PANEL(e4m3_keep, E4M3, KEEP, MORE_TILES, NO_TILES)
ROWS_BY_PANEL(mxfp4_keep, MXFP4, KEEP, MORE_TILES, NO_TILES)
ROWS_BY_PANEL(float32_again, FLOAT32, AGAIN, MORE_TILES, NO_TILES)
typedef void (*RowsByPanel)(const Tile *, i64 rows);
static const RowsByPanel by_direct[] = {float32_direct, bfloat16_direct, int8_direct, e4m3_direct, mxfp4_direct};
static const RowsByPanel by_keep[] = {float32_again, bfloat16_keep, int8_keep, e4m3_keep, mxfp4_keep};

/* The scales of a row of 128 x 128 blocks. */
INLINE const float *block_scales(const float *scale, i64 block_row, i64 k)
{
    return scale + block_row * ((k + SCALE_GROUP - 1) / SCALE_GROUP);
}

/* Writes the scales of columns as a tile takes them, and zeros behind them, for Panel.channels. */
INLINE void channel_scales(const float *scale, i64 wanted, i64 count, float *to)
{
    for (i64 c = 0; c < count; c++) to[c] = c < wanted ? scale[c] * E4M3_UNIT : 0;
}

INLINE i64 k_block(i64 kind) { return kind == E4M3 ? SCALE_GROUP : K_BLOCK; }
INLINE i64 row_blocks(i64 rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }

/* y[r][0 .. width) = x[r] W^T. The panel comes from memory once: in blocks of k that stay in the cache for all rows,
   which meanwhile fetch the next block. */
static void panel_product(const Panel *p, const Rows *g)
{
    i64 blocks = row_blocks(g->rows), step = bytes_per_k(p->width, p->kind), block = k_block(p->kind);
    i64 direct = blocks == 1 || p->width < PANEL;
    _Alignas(64) float wide[K_BLOCK * PANEL], scale[K_BLOCK / MX_BLOCK * PANEL];
    for (i64 r = 0; r < g->rows && !p->k; r++) memset(g->y[r], 0, p->width * 4);
    for (i64 start = 0; start < p->k; start += block) {
        Tile t = {.width = p->width, .k = least(block, p->k - start), .more = start, .scale = scale, .wide = wide};
        t.x_step = g->packed ? MOST_ROWS : 1, t.ahead_step = step / blocks;
        if (p->channels) t.scale = p->channels;
        else if (p->kind == E4M3)
            for (i64 c = 0; c < p->width; c += VL)
                *(vf *)(scale + c) = splat(p->scale[c / 32][start / SCALE_GROUP] * E4M3_UNIT);
        if (p->kind == MXFP4)
            widen_e8m0(p->exponents + start / MX_BLOCK * p->width, t.k / MX_BLOCK * p->width, scale);
        for (i64 b = 0; b < blocks; b++) {
            i64 from = g->rows * b / blocks, rows = g->rows * (b + 1) / blocks - from;
            RowsByPanel product = direct ? by_direct[p->kind] : b ? float32_again : by_keep[p->kind];
            t.w = b && !direct && p->kind != FLOAT32 ? (const char *)wide : p->w + start * step;
            t.ahead = p->w + (start + block) * step + b * t.k * t.ahead_step;
            for (i64 r = 0; r < rows; r++) {
                t.x[r] = g->packed ? g->packed + (start * blocks + b * t.k) * MOST_ROWS + r : g->x[from + r] + start;
                t.y[r] = g->y[from + r];
            }
            product(&t, rows);
        }
    }
}

/* Packs a block of rows of x [k] for panel_product: neighbours lie side by side, so that it stays in the cache without
   gaps. */
static void pack_rows_block(const float *const *x, i64 rows, i64 k, i64 kind, i64 b, float *packed)
{
    i64 blocks = row_blocks(rows), from = rows * b / blocks, count = rows * (b + 1) / blocks - from;
    for (i64 start = 0; start < k; start += k_block(kind)) {
        i64 depth = least(k_block(kind), k - start);
        float *to = packed + (start * blocks + b * depth) * MOST_ROWS;
        for (i64 r = 0; r < count; r++)
            for (i64 i = 0; i < depth; i++) to[i * MOST_ROWS + r] = x[from + r][start + i];
    }
}
