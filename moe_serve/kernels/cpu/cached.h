/* Cached rows in 8 bits: int8 or e4m3 with a scale. Contract: quantise_cached and widen_cached of kernels/quantised.py,
   with the same bits. A row's bits depend on that row only. */
#pragma once
#include <math.h>
#include "weights.h"

typedef struct { /* of one layer */
    i64 kind, slot_step; /* kind of weights.h; elements from slot to slot */
    float *scales;       /* of slot 0; used where kind is INT8 or E4M3 */
    i64 scale_step;      /* floats from slot to slot */
} CachedForm;

enum { MAGIC_BITS = 0x4B400000 }; /* of 1.5 x 2^23: what is added to it is rounded to an integer, ties to even */

INLINE vi e4m3_bits(vf x)
{
    vi bits = (vi)x, sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    vi normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    vi subnormal = (vi)((vf)size * 512.0f + 12582912.0f) - MAGIC_BITS;
    vi is_small = (vf)size < 0x1p-6f;
    return ((is_small & subnormal) | (~is_small & normal)) | sign;
}

INLINE vi rounded_bits(vf x, i64 kind)
{
    if (kind == INT8) return (vi)(x + 12582912.0f) - MAGIC_BITS;
    return e4m3_bits(x);
}

/* Writes n numbers to `to` and their scale. A scale is NaN where a number is not finite. */
static void quantise_cached(const float *x, i64 n, i64 kind, char *to, float *scale)
{
    vf top[SPAN] = {}, bad[SPAN] = {};
    BY_REGISTER(n, vf v = get(x + i, j, count); vf size = (vf)((vi)v & 0x7fffffff);
                top[j] = pick(size > top[j], size, top[j]); bad[j] += v * 0.0f;)
    float amax = 1e-30f, most = kind == INT8 ? 127.0f : 448.0f;
    UNROLL for (int j = 0; j < SPAN; j++) {
        float here = highest(top[j]);
        amax = here > amax ? here : amax;
    }
    *scale = amax / most + sum16(bad);
    vf by = splat(most / amax);
    i64 i = 0;
    for (; i + VL <= n; i += VL) {
        vi bits = rounded_bits(*(const vf *)(x + i) * by, kind);
        *(vb *)(to + i) = __builtin_convertvector(bits, vb);
    }
    if (i < n) {
        vf v = {};
        memcpy(&v, x + i, (n - i) * 4);
        vb bytes = __builtin_convertvector(rounded_bits(v * by, kind), vb);
        memcpy(to + i, &bytes, n - i);
    }
}

/* Writes n numbers times their scale to `to`, and zeros up to a multiple of 16. */
INLINE void widen_cached_as(const int kind, const char *from, i64 n, float scale, float *to)
{
    vf by = splat(kind == INT8 ? scale : scale * E4M3_UNIT);
    i64 i = 0;
    for (; i + VL <= n; i += VL) *(vf *)(to + i) = (kind == INT8 ? widen_int8(from + i) : widen_e4m3(from + i)) * by;
    if (i < n) {
        char last[VL] = {};
        memcpy(last, from + i, n - i);
        vf v = (kind == INT8 ? widen_int8(last) : widen_e4m3(last)) * by;
        memset(to + i, 0, VL * 4);
        memcpy(to + i, &v, (n - i) * 4);
        i += VL;
    }
    for (; i % 16; i += VL) memset(to + i, 0, VL * 4);
}

INLINE void widen_cached(i64 kind, const char *from, i64 n, float scale, float *to)
{
    if (kind == INT8) widen_cached_as(INT8, from, n, scale, to);
    else widen_cached_as(E4M3, from, n, scale, to);
}
