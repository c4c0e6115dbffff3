/* x W^T of some rows and one panel of a packed weight.

   W [n, k] lies in panels of 64 columns of W^T, [panel][k][64]; n is padded to a multiple of 32, and the last panel is
   32 wide where that is enough; k is padded to an even number. In bfloat16 a word of 32 bits holds k and k + 1 of a
   column, [panel][k / 2][64][2]; in MXFP4 a byte does, k in its lower half, and the scales' exponents lie as a weight of
   bytes [n, k / 32] does. So the layout does not depend on the width of a register. Every output is one chain of
   fused multiply-adds in order of k, whatever the tile, blocking, thread or machine: its bits depend on its row of x
   and its column of W only. */
#pragma once
#include "weights.h"

/* Registers of columns that a tile of R rows has, so that its sums, its weights and a number of x fit. */
#if defined(__AVX512F__)
#define WIDEST(R) ((R) <= MOST_ROWS ? 4 : 2) /* of 32 registers */
#elif defined(__aarch64__)
#define WIDEST(R) ((R) <= 3 ? 8 : 4) /* of 32 registers, of 4 floats each */
#else
#define WIDEST(R) ((R) == 1 ? 8 : (R) <= 3 ? 4 : 2) /* of 16 registers */
#endif

enum { MOST_ROWS = 6, MOST_DIRECT = VL == 16 ? 8 : MOST_ROWS /* rows of a tile that reads from memory */ };
enum { STRIP = WIDEST(MOST_ROWS) * VL /* columns of a tile of MOST_ROWS */ };
enum { STRIPS = (int)PANEL / (int)STRIP /* of a panel */ };
/* Of a block of k the first cache keeps a strip for all rows; where a strip is a panel, the second one does. Where memory
   takes longer than products, strips take a small block by turns, so that its lines come from memory in their order. */
enum { K_BLOCK = STRIPS > 1 ? 256 : 512, ORDERED_K_BLOCK = 64, PREFETCH = 8192 /* bytes ahead */ };
enum { WIDE_K = 64 /* of k of GROUPS that are widened at once: they stay in the nearest cache */ };

/* How a tile reads its weights. DIRECT: from memory, of up to 6 rows; of float32 and bfloat16, which are soon widened,
   of up to MOST_DIRECT, and of twice as many in two blocks. It fetches the line 8 KB ahead into the second cache,
   since the first one would drop what is read now for lines a multiple of 4 KB ahead. AMD's processors read line by
   line a third faster if nobody fetches for them, but wait for memory between products where these take as long as
   reading: rows of two products for each byte. Where there are several strips, it fetches the next block. KEEP: the
   same for the first of several blocks of rows; it keeps what it widened. AGAIN: as float32, from what was kept. */
enum { DIRECT, KEEP, AGAIN };

/* One panel of a packed weight. */
typedef struct {
    i64 kind, width, k;
    const char *w;
    const float *scale[2];    /* E4M3 in blocks: of the first and the last 32 columns, one for every 128 of k */
    const float *channels;    /* E4M3 by channel: of each column, times E4M3_UNIT */
    const uint8_t *exponents; /* MXFP4 only: of the scales, [k / 32][width] */
    char *wide;               /* MXFP4 by tiles: room for the panel in bfloat16, for many rows */
    const struct Groups *groups; /* GROUPS only */
} Panel;

/* Some rows of x, and where their products go. */
typedef struct {
    i64 rows;
    const float *const *x; /* [rows], where the rows are not packed */
    const float *packed;   /* [k / block][rows / 6][block][6], see pack_rows; or 0 */
    float *const *y;       /* [rows], each at the first column of the panel */
} Rows;

/* Up to MOST_DIRECT rows, one panel or one strip of it, one block of k. */
typedef struct {
    const float *x[MOST_DIRECT];
    float *y[MOST_DIRECT];
    const char *w;
    const float *scale; /* see load_weights, [width]; MXFP4: [k / 32][width] */
    float *wide;        /* [k][STRIP], see KEEP */
    const char *ahead;  /* what is fetched into the cache on the way: as much as DIRECT reads, else ahead_step bytes */
    i64 ahead_step;     /* with every other k */
    i64 x_step, width, k;
    i64 more; /* goes on from what is in y */
} Tile;

/* Adds R rows by V registers of products of one k. 16 registers have no room for the weights and x beside the sums: of few
   rows x is in them, else the weights are. */
INLINE void add_products(const int R, const int V, const int kind, const int second, const float *const *x, i64 at,
                         const char *w, const float *scale, const int keeps, float *keep, vf acc[MOST_DIRECT][8])
{
    const int word = word_bytes(kind);
    vf a[MOST_DIRECT], b[8];
    if (R <= 3 && VL < 16) {
        UNROLL for (int r = 0; r < R; r++) a[r] = splat(x[r][at]);
        UNROLL for (int v = 0; v < V; v++) {
            b[v] = load_weights(kind, second, w + v * VL * word, scale + v * VL);
            if (keeps) *(vf *)(keep + v * VL) = b[v];
            UNROLL for (int r = 0; r < R; r++) add_product(&acc[r][v], a[r], b[v]);
        }
    } else {
        UNROLL for (int v = 0; v < V; v++) {
            b[v] = load_weights(kind, second, w + v * VL * word, scale + v * VL);
            if (keeps) *(vf *)(keep + v * VL) = b[v];
        }
        UNROLL for (int r = 0; r < R; r++) {
            a[r] = splat(x[r][at]);
            UNROLL for (int v = 0; v < V; v++) add_product(&acc[r][v], a[r], b[v]);
        }
    }
}

INLINE void fetch_lines(const char *from, const int bytes)
{
    UNROLL for (int line = 0; line < bytes; line += 64) __builtin_prefetch(from + line, 0, 2);
}

/* R rows by V registers from column `first` on, one of `strips` of what t says. */
INLINE void tile(const int R, const int V, const int strips, const int kind, const int way, const Tile *t, i64 first)
{
    const int word = word_bytes(kind), pairs = k_per_word(kind) == 2, read = V * VL * word;
    vf acc[MOST_DIRECT][8]; /* of constant size, and every loop over it unrolled: it lives in registers */
    const float *x[MOST_DIRECT], *scale = t->scale + first;
    i64 step = t->width * word, x_step = t->x_step, ahead_step = t->ahead_step, i = 0, at = 0;
    i64 fetches = strips > 1 || !is_amd || R * k_per_word(kind) >= 2 * word;
    const char *w = t->w + first * word, *ahead = t->ahead + first / (V * VL) * (pairs ? t->k / 2 : t->k) * read;
    float *wide = t->wide;
    UNROLL for (int r = 0; r < R; r++) {
        x[r] = t->x[r];
        UNROLL for (int v = 0; v < V; v++) acc[r][v] = t->more ? *(const vf *)(t->y[r] + first + v * VL) : (vf){};
    }
    for (; i + 2 <= t->k; i += 2, at += 2 * x_step) {
        add_products(R, V, kind, 0, x, at, w, scale, way == KEEP, wide, acc);
        if (way == DIRECT && !pairs && fetches) fetch_lines(strips == 1 ? w + PREFETCH : ahead, read), ahead += read;
        if (!pairs) w += step;
        add_products(R, V, kind, 1, x, at + x_step, w, scale, way == KEEP, wide + STRIP, acc);
        if (way == DIRECT) {
            if (fetches) fetch_lines(strips == 1 ? w + PREFETCH : ahead, read), ahead += read;
        } else {
            const char *line = ahead;
            ahead += ahead_step;
            __builtin_prefetch(line, 0, 2); /* one line is enough but for few rows and wide strips */
            if (STRIPS == 1)
                while ((line += 64) < ahead) __builtin_prefetch(line, 0, 2);
        }
        w += step, wide += 2 * STRIP;
        if (kind == MXFP4 && i % MX_BLOCK == MX_BLOCK - 2) scale += t->width;
    }
    if (i < t->k) add_products(R, V, kind, 0, x, at, w, scale, way == KEEP, wide, acc);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) *(vf *)(t->y[r] + first + v * VL) = acc[r][v];
}

#define V_OF(R, WIDTH) (WIDEST(R) * VL > (WIDTH) ? (WIDTH) / VL : WIDEST(R))
#define STRIPS_OF(R, WIDTH) ((WIDTH) / (V_OF(R, WIDTH) * VL))
#define TILES(R, WIDTH)                                                                                               \
    case R:                                                                                                           \
        for (i64 first = 0; first < WIDTH; first += V_OF(R, WIDTH) * VL)                                              \
            tile(R, V_OF(R, WIDTH), STRIPS_OF(R, WIDTH), kind, way, t, first);                                        \
        break;
#define UP_TO_6(WIDTH) TILES(1, WIDTH) TILES(2, WIDTH) TILES(3, WIDTH) TILES(4, WIDTH) TILES(5, WIDTH) TILES(6, WIDTH)
#if defined(__AVX512F__)
#define UP_TO_MOST(WIDTH) UP_TO_6(WIDTH) TILES(7, WIDTH) TILES(8, WIDTH)
#else
#define UP_TO_MOST(WIDTH) UP_TO_6(WIDTH)
#endif
#define STRIP_TILE(R) case R: tile(R, STRIP / VL, 1, kind, way, t, 0); break;

/* Not inlined: one copy for each kind and way. Several blocks of rows have 3 rows or more each, being cut evenly. */
#define DIRECT_TILES(name, KIND, ROWS)                                                                                \
    static __attribute__((noinline)) void name(const Tile *t, i64 rows)                                               \
    {                                                                                                                 \
        const int kind = KIND, way = DIRECT;                                                                          \
        if (t->width == PANEL) switch (rows) { ROWS(64) }                                                             \
        else switch (rows) { ROWS(32) }                                                                               \
    }
#define STRIP_TILES(name, KIND, WAY)                                                                                  \
    static __attribute__((noinline)) void name(const Tile *t, i64 rows)                                               \
    {                                                                                                                 \
        const int kind = KIND, way = WAY;                                                                             \
        switch (rows) { STRIP_TILE(3) STRIP_TILE(4) STRIP_TILE(5) STRIP_TILE(6) }                                     \
    }
DIRECT_TILES(float32_direct, FLOAT32, UP_TO_MOST)
DIRECT_TILES(bfloat16_direct, BFLOAT16, UP_TO_MOST)
DIRECT_TILES(int8_direct, INT8, UP_TO_6)
DIRECT_TILES(e4m3_direct, E4M3, UP_TO_6)
DIRECT_TILES(mxfp4_direct, MXFP4, UP_TO_6)
STRIP_TILES(float32_keep, FLOAT32, KEEP)
STRIP_TILES(bfloat16_keep, BFLOAT16, KEEP)
STRIP_TILES(int8_keep, INT8, KEEP)
STRIP_TILES(e4m3_keep, E4M3, KEEP)
STRIP_TILES(mxfp4_keep, MXFP4, KEEP)
STRIP_TILES(float32_again, FLOAT32, AGAIN)
typedef void (*RowsByTiles)(const Tile *, i64 rows);
static const RowsByTiles by_direct[] = {float32_direct, bfloat16_direct, int8_direct, e4m3_direct, mxfp4_direct};
static const RowsByTiles by_keep[] = {float32_keep, bfloat16_keep, int8_keep, e4m3_keep, mxfp4_keep};

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

INLINE i64 k_block(i64 kind) { return kind == E4M3 ? SCALE_GROUP : kind == GROUPS ? WIDE_K : K_BLOCK; }
INLINE i64 row_blocks(i64 rows) { return (rows + MOST_ROWS - 1) / MOST_ROWS; }

/* y[r][0 .. width) = x[r] W^T. The panel comes from memory once: in blocks of k, of which a strip stays in the cache for
   all rows, which meanwhile fetch the next block. */
static void panel_product(const Panel *p, const Rows *g)
{
    i64 few = p->kind <= BFLOAT16 && g->rows <= 2 * MOST_DIRECT; /* widening twice takes less time than keeping */
    i64 blocks = few ? (g->rows + MOST_DIRECT - 1) / MOST_DIRECT : row_blocks(g->rows);
    i64 step = bytes_per_k(p->width, p->kind), block = k_block(p->kind);
    i64 direct = few || blocks == 1 || p->width < STRIP, strips = direct ? 1 : p->width / STRIP;
    i64 in_order = g->rows <= 2 || (p->kind == FLOAT32 && blocks == 1);
    if (in_order && p->width > VL * (g->rows == 1 ? WIDEST(1) : g->rows <= 3 ? WIDEST(3) : WIDEST(MOST_ROWS)))
        block = ORDERED_K_BLOCK;
    _Alignas(64) float wide[K_BLOCK * STRIP], scale[K_BLOCK / MX_BLOCK * PANEL];
    for (i64 r = 0; r < g->rows && !p->k; r++) memset(g->y[r], 0, p->width * 4);
    for (i64 start = 0; start < p->k; start += block) {
        Tile t = {.width = p->width, .k = least(block, p->k - start), .more = start, .scale = scale, .wide = wide};
        i64 pairs = (t.k + 1) / 2, parts = strips * blocks, bytes = t.k * step;
        const char *w = p->w + start * step, *next = p->w + least(start + block, padded_to_2(p->k)) * step;
        t.x_step = g->packed ? MOST_ROWS : 1, t.ahead_step = bytes / (parts * pairs) + 1;
        if (p->channels) t.scale = p->channels;
        else if (p->kind == E4M3)
            for (i64 c = 0; c < p->width; c += VL)
                *(vf *)(scale + c) = splat(p->scale[c / 32][start / SCALE_GROUP] * E4M3_UNIT);
        if (p->kind == MXFP4)
            widen_e8m0(p->exponents + start / MX_BLOCK * p->width, t.k / MX_BLOCK * p->width, scale);
        for (i64 part = 0; part < parts; part++) {
            i64 column = part / blocks * STRIP, b = part % blocks, again = b && !direct;
            i64 from = g->rows * b / blocks, rows = g->rows * (b + 1) / blocks - from;
            Tile own = t;
            own.ahead = next + bytes * part / parts;
            own.w = w + column * word_bytes(p->kind), own.scale += column;
            if (again) own.w = (const char *)wide, own.width = STRIP;
            for (i64 r = 0; r < rows; r++) {
                own.x[r] = g->packed ? g->packed + (start * blocks + b * t.k) * MOST_ROWS + r : g->x[from + r] + start;
                own.y[r] = g->y[from + r] + column;
            }
            (direct ? by_direct[p->kind] : again ? float32_again : by_keep[p->kind])(&own, rows);
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
