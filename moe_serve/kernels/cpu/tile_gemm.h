/* x W^T with W in bfloat16, or widened to it, by tiles, of float32 rows without rounding: a row is split into three parts
   of 8 bits of mantissa each, high + middle + low = x. The parts of up to 5 rows are rows of one tile. Each part's
   products add up in an order that k alone fixes, then (low + middle) + high: a row's bits depend on that row and on W
   only.

   An x that is not finite is its high part; a part below 2^-126 counts as zero. The rows of a tile behind the parts are
   whatever follows in memory: a row of a product depends on no other. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include "gemm.h"
#include "tiles.h"

enum { ROW_PARTS = 3, TILE_GROUP = 5 /* rows whose parts share a tile */, MOST_TILE_ROWS = 80, PARTS_BYTES = 1 << 20 };
enum { TILES_AHEAD = 4096 /* bytes of weights that a single group fetches ahead */ };

static _Atomic i64 tiles_on;

INLINE i64 by_tiles(i64 kind) { return HAS_TILES && (kind == BFLOAT16 || kind == MXFP4) && tiles_on; }
INLINE i64 tile_steps(i64 k) { return (k + TILE_K - 1) / TILE_K; }

/* Parts lie [group][step of k][part][row of the group][32]: those of row r begin at row_parts(r, k), if it is the first
   of its group. */
INLINE i64 parts_bytes(i64 rows, i64 k) { return rows * tile_steps(k) * ROW_PARTS * LINE; }

/* How many rows at a time: as many as stay in the cache, with the weights of a panel. */
INLINE i64 tile_row_block(i64 k)
{
    i64 rows = PARTS_BYTES / parts_bytes(1, k + 1) / (2 * TILE_GROUP) * (2 * TILE_GROUP);
    return rows < 2 * TILE_GROUP ? 2 * TILE_GROUP : least(rows, MOST_TILE_ROWS);
}

/* Returns room for so many bytes of parts, and for what a tile reads behind them. */
static char *parts_room(i64 bytes)
{
    char *room = aligned_alloc(LINE, (bytes + TILE_ROWS * LINE + LINE - 1) / LINE * LINE);
    if (!room) {
        fprintf(stderr, "moe_serve: no memory for %lld bytes for AMX\n", (long long)bytes);
        abort();
    }
    return room;
}

typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias)); /* a row of a tile */
typedef int32_t i16x __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t u16x __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t u32x __attribute__((vector_size(64), aligned(4), may_alias));

/* Writes the parts of 16 floats, each `part_step` bytes behind the one before. */
INLINE void split16(v16 x, char *to, i64 part_step)
{
    if (!HAS_TILES) return;
    u32x bits = (u32x)x, size = bits & 0x7fffffffu;
    i16x special = (i16x)(size >= 0x7f800000u), nan = (i16x)(size > 0x7f800000u);
    u32x high = (bits & 0xffff0000u) | ((u32x)nan & 0x00400000u); /* a NaN stays one */
    v16 rest = (v16)((i16x)(x - (v16)high) & ~special);
    u32x middle = (u32x)rest & 0xffff0000u, low = (u32x)(rest - (v16)middle);
    *(u16x *)to = __builtin_convertvector(high >> 16, u16x);
    *(u16x *)(to + part_step) = __builtin_convertvector(middle >> 16, u16x);
    *(u16x *)(to + 2 * part_step) = __builtin_convertvector(low >> 16, u16x);
}

/* Splits a row of k floats, the `place`-th of a group of `count`. parts: of the group */
static void split_row(const float *x, i64 k, i64 place, i64 count, char *parts)
{
    char *to = parts + place * LINE;
    i64 step = ROW_PARTS * count * LINE;
    for (i64 i = 0; i < tile_steps(k) * TILE_K; i += 16) {
        v16 v = {};
        memcpy(&v, x + i, least(16, i < k ? k - i : 0) * 4);
        split16(v, to + i / TILE_K * step + i % TILE_K * 2, count * LINE);
    }
}

/* Splits some rows, group by group. parts: of the first of them */
static void split_rows(const float *const *x, i64 rows, i64 k, char *parts)
{
    for (i64 r = 0; r < rows; r++) {
        i64 first = r / TILE_GROUP * TILE_GROUP;
        split_row(x[r], k, r - first, least(TILE_GROUP, rows - first), parts + parts_bytes(first, k));
    }
}

/* What a product by tiles reads. */
typedef struct {
    i64 k, width;
    const char *w, *tail; /* tail: the weights of the last step where k is no multiple of 32, with zeros behind them */
    const char *ahead;    /* fetched into the cache, ahead_step bytes with every step of k */
    i64 ahead_step;
    const Panel *mxfp4; /* what is widened on the way; or 0 */
} TilePanel;

/* y = (low + middle) + high of 16 columns of a group. */
INLINE void add_parts(const float *sums, i64 rows, float *const *y, i64 column)
{
    for (i64 r = 0; r < rows; r++) {
        v16 high = *(const v16 *)(sums + r * 16), middle = *(const v16 *)(sums + (rows + r) * 16);
        *(v16 *)(y[r] + column) = (*(const v16 *)(sums + (2 * rows + r) * 16) + middle) + high;
    }
}

#define STORE_SUMS(t, rows, y, column)                                                                                \
    do {                                                                                                              \
        TILE_STORE(t, sums, LINE);                                                                                    \
        add_parts(sums, rows, y, column);                                                                             \
    } while (0)

/* Writes 32 of k of a panel of MXFP4 as bfloat16, which holds all its numbers exactly. */
INLINE void widen_step(const Panel *p, i64 step, char *to)
{
    float scale[PANEL];
    const char *w = p->w + step * TILE_K / 2 * p->width;
    widen_e8m0(p->exponents + step * p->width, p->width, scale);
    for (i64 pair = 0; pair < TILE_K / 2; pair++, w += p->width, to += p->width * 4) {
        __builtin_prefetch(w + PREFETCH, 0, 2);
        for (i64 c = 0; c < p->width; c += VL) {
            vf by = *(const vf *)(scale + c), even = widen_e2m1(w + c, 0) * by, odd = widen_e2m1(w + c, 1) * by;
            *(vu *)(to + c * 4) = (vu)even >> 16 | ((vu)odd & 0xffff0000u);
        }
    }
}
_Static_assert(MX_BLOCK == TILE_K, "a step has one scale for each column");

/* A group by the whole panel. */
INLINE void group_product(const int columns, const TilePanel *p, const char *parts, i64 rows, float *const *y)
{
    _Alignas(64) float sums[TILE_ROWS * TILE_COLUMNS];
    _Alignas(64) char wide[2][TILE_K * PANEL * 2]; /* by turns: tiles load one while the other is written */
    i64 step = p->width * 4, full = p->k / TILE_K, steps = tile_steps(p->k);
    const char *w = p->w;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (i64 i = 0; i < steps; i++, parts += ROW_PARTS * rows * LINE, w += 16 * step) {
        if (i == full) w = p->tail;
        if (p->mxfp4) widen_step(p->mxfp4, i, wide[i % 2]), w = wide[i % 2];
        for (i64 line = 0; !p->mxfp4 && i < full && line < 16 * step; line += LINE)
            __builtin_prefetch(w + TILES_AHEAD + line);
        TILE_LOAD(4, parts, LINE);
        TILE_LOAD(5, w, step);
        TILE_PRODUCT(0, 4, 5);
        TILE_LOAD(6, w + LINE, step);
        TILE_PRODUCT(1, 4, 6);
        if (columns == 2) continue;
        TILE_LOAD(7, w + 2 * LINE, step);
        TILE_PRODUCT(2, 4, 7);
        TILE_LOAD(5, w + 3 * LINE, step);
        TILE_PRODUCT(3, 4, 5);
    }
    STORE_SUMS(0, rows, y, 0);
    STORE_SUMS(1, rows, y, 16);
    if (columns == 2) return;
    STORE_SUMS(2, rows, y, 32);
    STORE_SUMS(3, rows, y, 48);
}

/* Two groups, the first of 5 rows, by 32 columns from `column` on: each tile is loaded for two products. */
static void two_groups_product(TilePanel *p, const char *parts, i64 rows, float *const *y, i64 column)
{
    _Alignas(64) float sums[TILE_ROWS * TILE_COLUMNS];
    i64 step = p->width * 4, full = p->k / TILE_K, steps = tile_steps(p->k), second = rows - TILE_GROUP;
    const char *w = p->w + column * 4, *more = parts + parts_bytes(TILE_GROUP, p->k);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (i64 i = 0; i < steps; i++, w += 16 * step) {
        if (i == full) w = p->tail + column * 4;
        for (const char *end = p->ahead + p->ahead_step; p->ahead < end; p->ahead += LINE)
            __builtin_prefetch(p->ahead, 0, 2); /* not into the nearest cache: it is for the next panel */
        TILE_LOAD(4, parts, LINE);
        TILE_LOAD(6, w, step);
        TILE_PRODUCT(0, 4, 6);
        TILE_LOAD(7, w + LINE, step);
        TILE_PRODUCT(1, 4, 7);
        TILE_LOAD(5, more, LINE);
        TILE_PRODUCT(2, 5, 6);
        TILE_PRODUCT(3, 5, 7);
        parts += ROW_PARTS * TILE_GROUP * LINE, more += ROW_PARTS * second * LINE;
    }
    STORE_SUMS(0, TILE_GROUP, y, column);
    STORE_SUMS(1, TILE_GROUP, y, column + 16);
    STORE_SUMS(2, second, y + TILE_GROUP, column);
    STORE_SUMS(3, second, y + TILE_GROUP, column + 16);
}

/* Writes a panel of MXFP4 as one of bfloat16, for several groups. */
static void widen_panel(const Panel *p)
{
    for (i64 i = 0; i < p->k / TILE_K; i++) widen_step(p, i, p->wide + i * 16 * p->width * 4);
}

/* y[r][0 .. width) = x[r] W^T, as panel_product. The caller's thread has begun with tiles. */
static void panel_product_by_tiles(const Panel *panel, i64 rows, const char *parts, float *const *y)
{
    _Alignas(64) char tail[TILE_ROWS * PANEL * 4];
    i64 step = panel->width * 4, full = panel->k / TILE_K, pairs = (rows + 2 * TILE_GROUP - 1) / (2 * TILE_GROUP);
    i64 stored = bytes_per_k(panel->width, panel->kind);
    TilePanel p = {panel->k, panel->width, panel->w, tail, panel->w + padded_to_2(panel->k) * stored, 0, 0};
    p.ahead_step = TILE_K * stored / (pairs * (panel->width / 32)) / LINE * LINE;
    if (panel->kind == MXFP4 && rows > TILE_GROUP) widen_panel(panel), p.w = panel->wide;
    else if (panel->kind == MXFP4) p.mxfp4 = panel;
    if (panel->k % TILE_K) {
        i64 bytes = padded_to_2(panel->k % TILE_K) / 2 * step;
        memset(tail, 0, sizeof tail), memcpy(tail, p.w + full * 16 * step, bytes);
    }
    for (i64 r = 0; r < rows; r += 2 * TILE_GROUP) {
        i64 count = least(2 * TILE_GROUP, rows - r);
        const char *from = parts + parts_bytes(r, panel->k);
        if (count > TILE_GROUP)
            for (i64 column = 0; column < panel->width; column += 32) two_groups_product(&p, from, count, y + r, column);
        else if (panel->width == PANEL) group_product(4, &p, from, count, y + r);
        else group_product(2, &p, from, count, y + r);
    }
}
