/* What a block of attention rows does with one tile of keys once there are scores: weights, weighted values. */
#pragma once
#include <math.h>
#include "attention_score.h"

typedef struct { /* the rows of one piece; padded to whole tiles by rows that are never written out */
    i64 rows, tiles, width, value_width; /* widths padded to a multiple of 16 */
    float *q, *acc, *p;     /* [rows][width] scaled, [rows][value_width], [rows][KEYS] */
    float *most;            /* [rows] highest score so far */
    v16 *sum;               /* [rows] of the weights, by lane */
    i64 *seen;              /* [rows] how many keys the row sees */
    float *turned, *values; /* [KEYS / TURNED][width][TURNED], [KEYS][value_width]: copies of a tile, where they pay */
} Block;

INLINE i64 padded(i64 width) { return (width + 15) / 16 * 16; }

INLINE float highest(vf v)
{
    float part[VL];
    memcpy(part, &v, sizeof part);
    for (int half = VL / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] = part[i] > part[i + half] ? part[i] : part[i + half];
    return part[0];
}

/* Turns one row's scores of a tile into weights; `count` of them are seen. A higher maximum shrinks what was summed. */
static void soften(Block *b, i64 row, i64 count)
{
    float *p = b->p + row * KEYS, *acc = b->acc + row * b->value_width, before = b->most[row];
    vf lowest = (vf){} - INFINITY, best = lowest, *sum = (vf *)(b->sum + row), total[SPAN] = {};
    for (; count % 16; count++) p[count] = -INFINITY;
    for (i64 i = 0; i < count; i += VL) { /* NaN is never above; its weight will be NaN */
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
    for (i64 i = 0; i < count; i += 16)
        UNROLL for (int j = 0; j < SPAN; j++) {
            vf x = *(const vf *)(p + i + VL * j), weight = pick(x == lowest, (vf){}, exp_vf(x - most));
            *(vf *)(p + i + VL * j) = weight;
            total[j] += weight;
        }
    UNROLL for (int i = 0; i < SPAN; i++) sum[i] += total[i];
}

#ifdef __AVX512F__
enum { WIDEST = 4 }; /* registers of values at a time */
#else
enum { WIDEST = SPAN };
#endif

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
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) sum[r][v] += p[r * KEYS + t] * x[v];
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) *(vf *)(acc + r * step + column + VL * v) = sum[r][v];
}

/* One tile of rows: first the keys that all rows see, then those of single rows. */
INLINE void weigh_columns(const int V, const Block *b, i64 tile, const float *const *value, i64 column, i64 first)
{
    i64 step = b->value_width, common = least(b->seen[tile * ROWS] - first, KEYS);
    const float *p = b->p + tile * ROWS * KEYS;
    float *acc = b->acc + tile * ROWS * step;
    if (common > 0) add_values(ROWS, V, p, value, column, 0, common, acc, step);
    else common = 0;
    for (i64 r = 1; r < ROWS; r++) {
        i64 count = least(b->seen[tile * ROWS + r] - first, KEYS);
        if (count > common) add_values(1, V, p + r * KEYS, value, column, common, count, acc + r * step, step);
    }
}

static void weigh(const Block *b, const float *const *value, i64 first)
{
    i64 column = 0;
#define COLUMNS(V)                                                                                                     \
    for (; column + VL * V <= b->value_width; column += VL * V)                                                        \
        for (i64 tile = 0; tile < b->tiles; tile++)                                                                    \
            if (b->seen[tile * ROWS + ROWS - 1] > first) weigh_columns(V, b, tile, value, column, first);
#ifdef __AVX512F__
    COLUMNS(4)
    COLUMNS(2)
    COLUMNS(1)
#else
    COLUMNS(SPAN)
#endif
#undef COLUMNS
}

