/* What a block of attention rows does with one tile of keys: scores, weights, weighted values. */
#pragma once
#include <math.h>
#include "vec.h"

enum { KEYS = 64, ROWS = 4 }; /* of a tile of keys, of a tile of rows */

typedef struct { /* the rows of one piece; padded to whole tiles by rows that are never written out */
    i64 rows, tiles, width, value_width; /* widths padded to a multiple of 16 */
    float *q, *acc, *p;            /* [rows][width] scaled, [rows][value_width], [rows][KEYS] */
    float *most;                   /* [rows] highest score so far */
    v16 *sum;                      /* [rows] of the weights, by lane */
    i64 *seen;                     /* [rows] how many keys the row sees */
    float *keys, *values;          /* [KEYS][width], [KEYS][value_width]: copies of a tile, where they pay */
} Block;

INLINE i64 padded(i64 width) { return (width + 15) / 16 * 16; }

#ifdef __clang__
#define SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, (type){__VA_ARGS__})
#endif
/* Lanes with `bit` from b and the others from a: where they are, and those `bit` away. */
#define HERE(n, bit, i) ((i) & (bit) ? (n) + (i) : (i))
#define AWAY(n, bit, i) HERE(n, bit, (i) ^ (bit)) ^ (n)
#define LANES4(F, n, bit, i) F(n, bit, i), F(n, bit, i + 1), F(n, bit, i + 2), F(n, bit, i + 3)
#define LANES16(F, bit) LANES4(F, 16, bit, 0), LANES4(F, 16, bit, 4), LANES4(F, 16, bit, 8), LANES4(F, 16, bit, 12)

#ifdef __AVX512F__
/* scores of 4 rows x 4 keys: each is 16 sums over every 16th product, added as a tree as in sum16 */
#define HALVE(bit)                                                                                                     \
    UNROLL for (int i = 0; i < bit; i++) acc[i] = SHUFFLE(i16x, acc[i], acc[i + bit], LANES16(HERE, bit)) +            \
                                                  SHUFFLE(i16x, acc[i], acc[i + bit], LANES16(AWAY, bit));
static void score(const float *q, i64 width, const float *const *key, float *p)
{
    v16 acc[ROWS * 4] = {};
    for (i64 d = 0; d < width; d += 16) {
        v16 k[4];
        UNROLL for (int j = 0; j < 4; j++) k[j] = *(const v16 *)(key[j] + d);
        UNROLL for (int r = 0; r < ROWS; r++) {
            v16 x = *(const v16 *)(q + r * width + d);
            UNROLL for (int j = 0; j < 4; j++) acc[4 * r + j] += x * k[j];
        }
    }
    HALVE(8) HALVE(4) HALVE(2) HALVE(1)
    UNROLL for (int r = 0; r < ROWS; r++) memcpy(p + r * KEYS, (const float *)acc + 4 * r, 16);
}
enum { WIDEST = 4 }; /* v16 of values at a time */
#else
typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef i32 i4x __attribute__((vector_size(16)));
#define PAIR(bit, a, b) (SHUFFLE(i4x, a, b, LANES4(HERE, 4, bit, 0)) + SHUFFLE(i4x, a, b, LANES4(AWAY, 4, bit, 0)))
INLINE v4 quarters(const float *x)
{
    return (*(const v4 *)x + *(const v4 *)(x + 8)) + (*(const v4 *)(x + 4) + *(const v4 *)(x + 12));
}

/* the same sums from fewer registers */
static void score(const float *q, i64 width, const float *const *key, float *p)
{
    float part[4][16];
    for (int r = 0; r < ROWS; r++, q += width, p += KEYS) {
        v16 acc[4] = {};
        for (i64 d = 0; d < width; d += 16)
            UNROLL for (int j = 0; j < 4; j++) acc[j] += *(const v16 *)(q + d) * *(const v16 *)(key[j] + d);
        memcpy(part, acc, sizeof part);
        v4 first = PAIR(2, quarters(part[0]), quarters(part[2])), second = PAIR(2, quarters(part[1]), quarters(part[3]));
        *(v4 *)p = PAIR(1, first, second);
    }
}
enum { WIDEST = 1 };
#endif

/* Turns one row's scores of a tile into weights; `count` of them are seen. A higher maximum shrinks what was summed. */
static void soften(Block *b, i64 row, i64 count)
{
    static const i16x lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float *p = b->p + row * KEYS, *acc = b->acc + row * b->value_width;
    v16 lowest = (v16){} - INFINITY, best = lowest, total = {};
    for (i64 i = 0; i < count; i += 16) {
        v16 x = *(const v16 *)(p + i);
        if (count - i < 16) x = pick16(lane < (i32)(count - i), x, lowest);
        best = pick16(x > best, x, best);
    }
    float before = b->most[row], most = max16(best);
    if (most > before) {
        b->most[row] = most;
        if (before > -INFINITY) {
            float factor = exp16((v16){} + (before - most))[0];
            b->sum[row] *= factor;
            for (i64 d = 0; d < b->value_width; d += 16) *(v16 *)(acc + d) *= factor;
        }
    }
    most = b->most[row];
    for (i64 i = 0; i < count; i += 16) {
        v16 weight = exp16(*(const v16 *)(p + i) - most);
        if (count - i < 16) weight = pick16(lane < (i32)(count - i), weight, (v16){});
        *(v16 *)(p + i) = weight;
        total += weight;
    }
    b->sum[row] += total;
}

/* acc[r] += p[r][t] * value[t], t in order, for R rows and V times 16 columns */
INLINE void add_values(const int R, const int V, const float *p, const float *const *value, i64 column, i64 from,
                       i64 to, float *acc, i64 step)
{
    v16 sum[ROWS][4];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) sum[r][v] = *(const v16 *)(acc + r * step + column + 16 * v);
    for (i64 t = from; t < to; t++) {
        v16 x[4];
        UNROLL for (int v = 0; v < V; v++) x[v] = *(const v16 *)(value[t] + column + 16 * v);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++) sum[r][v] += p[r * KEYS + t] * x[v];
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) *(v16 *)(acc + r * step + column + 16 * v) = sum[r][v];
}

/* One tile of rows, `columns` columns from `column` on: first the keys that all rows see, then those of single rows. */
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
    for (; column + 16 * V <= b->value_width; column += 16 * V)                                                        \
        for (i64 tile = 0; tile < b->tiles; tile++)                                                                    \
            if (b->seen[tile * ROWS + ROWS - 1] > first) weigh_columns(V, b, tile, value, column, first);
    if (WIDEST == 4) {
        COLUMNS(4)
        COLUMNS(2)
    }
    COLUMNS(1)
#undef COLUMNS
}

