/* Weighted sums of rows in float32: each step is one fused multiply-add, in the order of k, from zero. */

#pragma once
#include <string.h>
#include "row_copy.h"

typedef float vf __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(2)));
/* Lines are asked for 1 KiB ahead: rows lie far from each other, and a processor's own prefetch stops at a page's end. */
enum { WIDTH = 16, BLOCK = 4 * WIDTH, BLOCK_BF16 = 8 * WIDTH, AHEAD_F32 = 256, AHEAD_BF16 = 512 };

static inline float widen(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t narrow(float value) /* to nearest, ties to even; one NaN */
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline vu round_bf16(vf sum) /* as narrow, in the upper half of each word */
{
    vu bits = (vu)sum, nan = (vu)(sum != sum);
    return ((bits + 0x7fff + ((bits >> 16) & 1)) & ~nan) | (nan & 0x7fc00000);
}

/* A word holds two values: the lower one is shifted up, the upper one is masked, which costs less than widening both. */
static void add_rows_bf16(const uint16_t **rows, const float *weights, i64 num, i64 hidden, uint16_t *out)
{
    i64 h = 0;
    for (; h + BLOCK_BF16 <= hidden; h += BLOCK_BF16) {
        vf low[4] = {{0}, {0}, {0}, {0}}, high[4] = {{0}, {0}, {0}, {0}};
        for (i64 k = 0; k < num; k++)
            for (int j = 0; j < 4; j++) {
                vu words = *(const vu *)(rows[k] + h + j * 2 * WIDTH);
                __builtin_prefetch(rows[k] + h + j * 2 * WIDTH + AHEAD_BF16);
                low[j] += (vf)(words << 16) * weights[k];
                high[j] += (vf)(words & 0xffff0000) * weights[k];
            }
        for (int j = 0; j < 4; j++)
            *(vu *)(out + h + j * 2 * WIDTH) = (round_bf16(low[j]) >> 16) | (round_bf16(high[j]) & 0xffff0000);
    }
    for (; h < hidden; h++) {
        float sum = 0;
        for (i64 k = 0; k < num; k++)
            sum = __builtin_fmaf(weights[k], widen(rows[k][h]), sum);
        out[h] = narrow(sum);
    }
}

static void add_rows_f32(const float **rows, const float *weights, i64 num, i64 hidden, float *out)
{
    i64 h = 0;
    for (; h + BLOCK <= hidden; h += BLOCK) {
        vf sum[4] = {{0}, {0}, {0}, {0}};
        for (i64 k = 0; k < num; k++)
            for (int j = 0; j < 4; j++) {
                sum[j] += *(const vf *)(rows[k] + h + j * WIDTH) * weights[k];
                __builtin_prefetch(rows[k] + h + j * WIDTH + AHEAD_F32);
            }
        for (int j = 0; j < 4; j++)
            *(vf *)(out + h + j * WIDTH) = sum[j];
    }
    for (; h < hidden; h++) {
        float sum = 0;
        for (i64 k = 0; k < num; k++)
            sum = __builtin_fmaf(weights[k], rows[k][h], sum);
        out[h] = sum;
    }
}

/* out [num_tokens, hidden]: for each token, the weighted sum of `num` rows */
static void add_rows(const i64 *facts, const void **rows, const float *weights, i64 num, void *out)
{
    if (facts[IS_BF16])
        add_rows_bf16((const uint16_t **)rows, weights, num, facts[HIDDEN], out);
    else
        add_rows_f32((const float **)rows, weights, num, facts[HIDDEN], out);
}
