/* Scores of attention: products of rows of queries with keys. A score is 16 sums, each over every 16th product in order,
   added as the tree of sum16; both ways here give the same bits. */
#pragma once
#include "vec.h"

enum { KEYS = 64, ROWS = 4 }; /* of a tile of keys, of a tile of rows */

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

typedef float v4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef i32 i4x __attribute__((vector_size(16)));

#ifdef __AVX512F__
enum { TURNED = 32 }; /* keys at a time in score_turned */
#else
enum { TURNED = 16 };
#endif
enum { WIDE = TURNED / VL }; /* registers of TURNED floats */

#ifdef __AVX512F__
#define HALVE(bit)                                                                                                     \
    UNROLL for (int i = 0; i < bit; i++) acc[i] = SHUFFLE(vi, acc[i], acc[i + bit], LANES16(HERE, bit)) +              \
                                                  SHUFFLE(vi, acc[i], acc[i + bit], LANES16(AWAY, bit));
static void score(const float *q, i64 width, const float *const *key, float *p)
{
    vf acc[ROWS * 4] = {};
    for (i64 d = 0; d < width; d += 16) {
        vf k[4];
        UNROLL for (int j = 0; j < 4; j++) k[j] = *(const vf *)(key[j] + d);
        UNROLL for (int r = 0; r < ROWS; r++) {
            vf x = *(const vf *)(q + r * width + d);
            UNROLL for (int j = 0; j < 4; j++) acc[4 * r + j] += x * k[j];
        }
    }
    HALVE(8) HALVE(4) HALVE(2) HALVE(1)
    UNROLL for (int r = 0; r < ROWS; r++) memcpy(p + r * KEYS, (const float *)acc + 4 * r, 16);
}
#else
#define PAIR(bit, a, b) (SHUFFLE(i4x, a, b, LANES4(HERE, 4, bit, 0)) + SHUFFLE(i4x, a, b, LANES4(AWAY, 4, bit, 0)))
INLINE v4 quarters(const float *x)
{
    return (*(const v4 *)x + *(const v4 *)(x + 8)) + (*(const v4 *)(x + 4) + *(const v4 *)(x + 12));
}

/* the same sums with fewer registers */
static void score(const float *q, i64 width, const float *const *key, float *p)
{
    float part[4][16];
    for (int r = 0; r < ROWS; r++, q += width, p += KEYS) {
        vf acc[4][SPAN] = {};
        for (i64 d = 0; d < width; d += 16)
            UNROLL for (int i = 0; i < SPAN; i++) {
                vf x = *(const vf *)(q + d + i * VL);
                UNROLL for (int j = 0; j < 4; j++) acc[j][i] += x * *(const vf *)(key[j] + d + i * VL);
            }
        memcpy(part, acc, sizeof part);
        v4 first = PAIR(2, quarters(part[0]), quarters(part[2])), second = PAIR(2, quarters(part[1]), quarters(part[3]));
        *(v4 *)p = PAIR(1, first, second);
    }
}
#endif

/* The sums of one lane, for ROWS rows and TURNED keys. */
INLINE void add_lane(const float *q, i64 width, const float *turned, i64 lane, vf sum[ROWS][WIDE])
{
    vf acc[ROWS][WIDE] = {};
    q += lane, turned += lane * TURNED;
    for (i64 d = lane; d < width; d += 16, q += 16, turned += 16 * TURNED) {
        vf k[WIDE];
        UNROLL for (int v = 0; v < WIDE; v++) k[v] = *(const vf *)(turned + VL * v);
        UNROLL for (int r = 0; r < ROWS; r++) {
            vf x = splat(q[r * width]);
            UNROLL for (int v = 0; v < WIDE; v++) add_product(&acc[r][v], x, k[v]);
        }
    }
    memcpy(sum, acc, sizeof acc);
}

#define EACH_SUM                                                                                                       \
    UNROLL for (int r = 0; r < ROWS; r++)                                                                              \
        UNROLL for (int v = 0; v < WIDE; v++)
/* ROWS rows x TURNED keys, which lie [width][TURNED]: no sum goes across a register. Lanes come in the order of the
   tree, so that at most four sums of each score wait. */
static void score_turned(const float *q, i64 width, const float *turned, float *p)
{
    vf sum[5][ROWS][WIDE];
#define ADD(to, from) EACH_SUM sum[to][r][v] += sum[from][r][v];
#define ONE(lane, at) add_lane(q, width, turned, lane, sum[at]);
#define TWO(lane, at) ONE(lane, at) ONE(lane + 8, at + 1) ADD(at, at + 1)
#define FOUR(lane, at) TWO(lane, at) TWO(lane + 4, at + 1) ADD(at, at + 1)
#define EIGHT(lane, at) FOUR(lane, at) FOUR(lane + 2, at + 1) ADD(at, at + 1)
    EIGHT(0, 0) EIGHT(1, 1) ADD(0, 1)
    EACH_SUM *(vf *)(p + r * KEYS + VL * v) = sum[0][r][v];
}

/* Writes 4 keys as 4 columns, TURNED floats from row to row. */
INLINE void turn4(const float *const *key, i64 width, float *turned)
{
    for (i64 d = 0; d < width; d += 4, turned += 4 * TURNED) {
        v4 a[4], b[4];
        UNROLL for (int j = 0; j < 4; j++) a[j] = width - d < 4 ? (v4){} : *(const v4 *)(key[j] + d);
        if (width - d < 4)
            for (int j = 0; j < 4; j++) memcpy(a + j, key[j] + d, (width - d) * 4);
        UNROLL for (int j = 0; j < 4; j++) /* halves change places, then neighbours */
            b[j] = j < 2 ? SHUFFLE(i4x, a[j], a[j + 2], 0, 1, 4, 5) : SHUFFLE(i4x, a[j - 2], a[j], 2, 3, 6, 7);
        UNROLL for (int j = 0; j < 4; j++)
            a[j] = j % 2 ? SHUFFLE(i4x, b[j - 1], b[j], 1, 5, 3, 7) : SHUFFLE(i4x, b[j], b[j + 1], 0, 4, 2, 6);
        UNROLL for (int j = 0; j < 4; j++) *(v4 *)(turned + j * TURNED) = a[j];
    }
}
