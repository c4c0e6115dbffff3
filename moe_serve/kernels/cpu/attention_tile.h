/* What a block of attention rows does with one tile of keys once there are scores: weights, weighted values. */
#pragma once
#include <math.h>
#include "attention_score.h"

typedef struct { /* the rows of one piece; padded to whole tiles by rows that are never written out */
    i64 rows, tiles, width, value_width; /* widths padded to a multiple of 16 */
    float *q, *acc, *p;     /* [rows][width] scaled, [rows][value_width], [rows][KEYS] */
    float *most;            /* [rows] highest score so far */
    float *sum;             /* [rows][16] of the weights, by lane */
    i64 *from, *seen;       /* [rows] the first key that the row sees, and the one behind the last; neither falls */
    float *turned, *values; /* [KEYS / TURNED][width][TURNED], [KEYS][value_width]: copies of a tile, where they pay */
    float *wide;            /* [KEYS][width], [KEYS][value_width]: a tile that lies in 8 bits; else 0 */
} Block;

INLINE i64 padded(i64 width) { return (width + 15) / 16 * 16; }

/* Where keys from `from` on begin in a tile. */
INLINE i64 from_tile(i64 from, i64 tile) { return from > tile ? from - tile : 0; }

/* Whether any row of a tile of rows sees a key from `first` to before `end`. */
INLINE int sees(const Block *b, i64 tile, i64 first, i64 end)
{
    return b->seen[tile * ROWS + ROWS - 1] > first && b->from[tile * ROWS] < end;
}

/* Turns one row's scores of a tile into weights; those from `from` to before `count` are seen. A higher maximum shrinks
   what was summed. */
static void soften(Block *b, i64 row, i64 from, i64 count)
{
    float *p = b->p + row * KEYS, *acc = b->acc + row * b->value_width, before = b->most[row];
    vf lowest = (vf){} - INFINITY, best = lowest, *sum = (vf *)(b->sum + row * 16), total[SPAN] = {};
    for (; count % 16; count++) p[count] = -INFINITY;
    for (; from % 16; from--) p[from - 1] = -INFINITY;
    for (i64 i = from; i < count; i += VL) { /* NaN is never above; its weight will be NaN */
        vf x = *(const vf *)(p + i);
        best = pick(x > best, x, best);
    }
    float most = highest(best);
    if (most > before) {
        b->most[row] = most;
        if (before > -INFINITY) {
            vf factor = exp_vf((vf){} + (before - most));
            UNROLL for (int i = 0; i < SPAN; i++) sum[i] *= factor;
            for (i64 d = 0; d < b->value_width; d += VL) *(vf *)(acc + d) *= factor;
        }
    } else most = before;
    for (i64 i = from; i < count; i += 16)
        UNROLL for (int j = 0; j < SPAN; j++) {
            vf x = *(const vf *)(p + i + VL * j), weight = pick(x == lowest, (vf){}, exp_vf(x - most));
            *(vf *)(p + i + VL * j) = weight;
            total[j] += weight;
        }
    UNROLL for (int i = 0; i < SPAN; i++) sum[i] += total[i];
}

enum { WIDEST = VL == 8 ? 3 : 4 }; /* registers of values at a time: 12 sums of 16 registers, or 16 of 32 */

/* acc[r] += p[r][t] * value[t], t in order, for R rows and V registers of columns */
INLINE void add_values(const int R, const int V, const float *p, const float *const *value, i64 column, i64 from,
                       i64 to, float *acc, i64 step)
{
    vf sum[ROWS][WIDEST];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) sum[r][v] = *(const vf *)(acc + r * step + column + VL * v);
    for (i64 t = from; t < to; t++) {
        vf x[WIDEST];
        UNROLL for (int v = 0; v < V; v++) x[v] = *(const vf *)(value[t] + column + VL * v);
        UNROLL for (int r = 0; r < R; r++) {
            vf weight = splat(p[r * KEYS + t]);
            UNROLL for (int v = 0; v < V; v++) add_product(&sum[r][v], weight, x[v]);
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) *(vf *)(acc + r * step + column + VL * v) = sum[r][v];
}

/* One tile of rows: keys that all rows see together, those before and behind them row by row. */
INLINE void weigh_columns(const int V, const Block *b, i64 tile, const float *const *value, i64 column, i64 first)
{
    const i64 *from = b->from + tile * ROWS, *seen = b->seen + tile * ROWS;
    i64 step = b->value_width, start = from_tile(from[ROWS - 1], first), end = least(seen[0] - first, KEYS);
    const float *p = b->p + tile * ROWS * KEYS;
    float *acc = b->acc + tile * ROWS * step;
    if (start >= end) start = end = KEYS; /* none: each row goes by itself */
    for (i64 r = 0; r < ROWS; r++) {
        i64 begin = from_tile(from[r], first), before = least(seen[r] - first, start);
        if (begin < before) add_values(1, V, p + r * KEYS, value, column, begin, before, acc + r * step, step);
    }
    if (start < end) add_values(ROWS, V, p, value, column, start, end, acc, step);
    for (i64 r = 1; r < ROWS; r++) {
        i64 count = least(seen[r] - first, KEYS);
        if (count > end) add_values(1, V, p + r * KEYS, value, column, end, count, acc + r * step, step);
    }
}

static void weigh(const Block *b, const float *const *value, i64 first)
{
    i64 column = 0;
#define COLUMNS(V)                                                                                                     \
    for (; column + VL * V <= b->value_width; column += VL * V)                                                        \
        for (i64 tile = 0; tile < b->tiles; tile++)                                                                    \
            if (sees(b, tile, first, first + KEYS)) weigh_columns(V, b, tile, value, column, first);
    COLUMNS(WIDEST)
    COLUMNS(2)
    COLUMNS(1)
#undef COLUMNS
}

