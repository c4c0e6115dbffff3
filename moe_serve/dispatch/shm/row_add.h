/* Weighted sums of rows in float32: each step is one fused multiply-add, in the order of k, from zero. */

#pragma once
#include <string.h>
#include "../../kernels/cpu/vec.h"
#include "row_copy.h"

typedef uint32_t vu_of_rows __attribute__((vector_size(VL * 4), aligned(2), may_alias)); /* of bf16 rows, at any place */
/* Four or eight registers of sums, which fit beside what is added where there are 16. Lines are asked for ahead: rows
   lie far from each other, and a processor's own prefetch stops at a page's end. */
enum { BLOCK_F32 = 4 * VL, BLOCK_BF16 = 8 * VL };
INLINE i64 bytes_ahead(void) { return is_amd ? 512 : 1024; }

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

INLINE vu round_bf16(vf sum) /* as narrow, in the upper half of each word */
{
    vu bits = (vu)sum, nan = (vu)(sum != sum);
    return ((bits + 0x7fff + ((bits >> 16) & 1)) & ~nan) | (nan & 0x7fc00000);
}

/* A word holds two values: the lower one is shifted up, the upper one is masked, which costs less than widening both. */
static void add_rows_bf16(const uint16_t **rows, const float *weights, i64 num, i64 hidden, uint16_t *out)
{
    i64 h = 0, ahead = bytes_ahead() / 2;
    for (; h + BLOCK_BF16 <= hidden; h += BLOCK_BF16) {
        vf low[4] = {{0}}, high[4] = {{0}};
        for (i64 k = 0; k < num; k++)
            UNROLL for (int j = 0; j < 4; j++) {
                const uint16_t *at = rows[k] + h + j * 2 * VL;
                vu words = *(const vu_of_rows *)at;
                if (j * VL % 16 == 0) __builtin_prefetch(at + ahead);
                add_product(low + j, (vf)(words << 16), splat(weights[k]));
                add_product(high + j, (vf)(words & 0xffff0000), splat(weights[k]));
            }
        UNROLL for (int j = 0; j < 4; j++)
            *(vu_of_rows *)(out + h + j * 2 * VL) = (round_bf16(low[j]) >> 16) | (round_bf16(high[j]) & 0xffff0000);
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
    i64 h = 0, ahead = bytes_ahead() / 4;
    for (; h + BLOCK_F32 <= hidden; h += BLOCK_F32) {
        vf sum[4] = {{0}};
        for (i64 k = 0; k < num; k++)
            UNROLL for (int j = 0; j < 4; j++) {
                if (j * VL % 16 == 0) __builtin_prefetch(rows[k] + h + j * VL + ahead);
                add_product(sum + j, *(const vf *)(rows[k] + h + j * VL), splat(weights[k]));
            }
        UNROLL for (int j = 0; j < 4; j++)
            *(vf *)(out + h + j * VL) = sum[j];
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
