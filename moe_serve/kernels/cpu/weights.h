/* The kinds of packed weights, and how each is widened to float32. */
#pragma once
#include "vec.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

enum { FLOAT32, BFLOAT16, INT8, E4M3 }; /* linear.py has the same order */
enum { PANEL = 64, SCALE_GROUP = 128 /* columns and rows that share a scale in E4M3 */ };

typedef int8_t vb __attribute__((vector_size(VL), aligned(1), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));

INLINE i64 padded_to_32(i64 n) { return (n + 31) / 32 * 32; }
INLINE i64 bytes_of(i64 kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }
INLINE i64 num_panels(i64 n) { return (n + PANEL - 1) / PANEL; }
INLINE i64 panel_width(i64 n, i64 panel) { return n - panel * PANEL > 32 ? 64 : 32; }

INLINE const char *panel_at(const void *w, i64 panel, i64 k, i64 kind)
{
    return (const char *)w + panel * k * PANEL * bytes_of(kind);
}

/* The column of register v in a tile that begins at column `first` of the panel. */
INLINE i64 column_of(const int kind, i64 first, int v)
{
    if (kind != BFLOAT16) return first + v * VL;
    i64 words = first / 2 + v / 2 * VL; /* a tile begins where a vector of words does */
    return words / 16 * 32 + words % 16 + v % 2 * 16;
}

/* e4m3 times 1 / E4M3_UNIT, exact; 0x7f and 0xff, which are NaN, become +-480 / E4M3_UNIT. */
#if defined(__F16C__)
#define E4M3_UNIT 256.0f
INLINE vf widen_e4m3(vb bytes)
{
    /* a float16 with an exponent smaller by 8 and a shorter mantissa */
    typedef int16_t vs __attribute__((vector_size(VL * 2)));
    vs half = (__builtin_convertvector(bytes, vs) << 7) & (int16_t)~0x4000;
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)half);
#else
    return (vf)_mm256_cvtph_ps((__m128i)half);
#endif
}
#else
#define E4M3_UNIT 1.0f
INLINE vf widen_e4m3(vb bytes)
{
    vi wide = __builtin_convertvector(bytes, vi), bits = wide & 0x7f;
    vf normal = (vf)((bits << 20) + (120 << 23)), subnormal = __builtin_convertvector(bits, vf) * 0x1p-9f;
    vi is_small = bits < 8;
    return (vf)((is_small & (vi)subnormal) | (~is_small & (vi)normal) | (wide & (int32_t)0x80000000));
}
#endif

/* V registers of weights at one k, from column `first` on. w: the panel's row of that k */
INLINE void load_weights(const int V, const int kind, const char *w, i64 first, const float *scale, vf *b)
{
    UNROLL for (int v = 0; v < V; v++)
        if (kind == FLOAT32) b[v] = *(const vf *)((const float *)w + first + v * VL);
        else if (kind == BFLOAT16) {
            vu both = *(const vu *)((const uint16_t *)w + first + v / 2 * 2 * VL);
            b[v] = v % 2 ? (vf)(both & 0xffff0000u) : (vf)(both << 16);
        } else {
            vb bytes = *(const vb *)(w + first + v * VL);
            if (kind == INT8) b[v] = __builtin_convertvector(__builtin_convertvector(bytes, vi), vf);
            else b[v] = widen_e4m3(bytes) * scale[(first + v * VL) / 32];
        }
}
