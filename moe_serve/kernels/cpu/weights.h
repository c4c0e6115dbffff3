/* The kinds of packed weights, and how each is widened to float32. */
#pragma once
#include "vec.h"

enum { FLOAT32, BFLOAT16, INT8, E4M3, MXFP4, GROUPS /* groups.h */ }; /* linear.py has the same order */
enum { PANEL = 64, SCALE_GROUP = 128 /* columns and rows that share a scale in blocks of E4M3 */ };
enum { MX_BLOCK = 32 /* neighbours in k that share a scale in MXFP4, of which k is a multiple */ };

typedef int8_t vb __attribute__((vector_size(VL), aligned(1), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));

INLINE i64 padded_to_32(i64 n) { return (n + 31) / 32 * 32; }
INLINE i64 padded_to_2(i64 k) { return k + k % 2; }
INLINE i64 word_bytes(i64 kind) { return kind == FLOAT32 || kind == BFLOAT16 ? 4 : 1; }
INLINE int k_per_word(i64 kind) { return kind == BFLOAT16 || kind == MXFP4 ? 2 : 1; }
INLINE i64 bytes_per_k(i64 columns, i64 kind) { return columns * word_bytes(kind) / k_per_word(kind); }
INLINE i64 packed_bytes(i64 n, i64 k, i64 kind) { return padded_to_2(k) * bytes_per_k(padded_to_32(n), kind); }
INLINE i64 num_panels(i64 n) { return (n + PANEL - 1) / PANEL; }
INLINE i64 panel_width(i64 n, i64 panel) { return n - panel * PANEL > 32 ? 64 : 32; }

INLINE const char *panel_at(const void *w, i64 panel, i64 k, i64 kind)
{
    return (const char *)w + panel * padded_to_2(k) * bytes_per_k(PANEL, kind);
}

/* VL bytes as int8, and as e4m3 times 1 / E4M3_UNIT: both exact. 0x7f and 0xff, NaN in e4m3, become +-480. On x86
   e4m3 is read as a float16 with an exponent smaller by 8 and a shorter mantissa. */
#if defined(__AVX512F__)
/* VL numbers of e2m1, in the lower or the upper half of as many bytes. */
INLINE vf widen_e2m1(const char *w, i64 second)
{
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)w)); /* their lowest 4 bits count below */
    if (second) codes = _mm512_srli_epi32(codes, 4);
    return (vf)_mm512_permutexvar_ps(
        codes, _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6));
}

#define E4M3_UNIT 256.0f
INLINE vf widen_int8(const char *w)
{
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)w)));
}

INLINE vf widen_e4m3(const char *w)
{
    __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)w)), 7);
    return (vf)_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16((int16_t)~0x4000)));
}
#elif defined(__AVX2__) && defined(__F16C__)
INLINE vf widen_e2m1(const char *w, i64 second)
{
    __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)w)); /* the permutation takes 3 bits */
    if (second) codes = _mm256_srli_epi32(codes, 4);
    __m256 size = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), codes);
    __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)), _mm256_set1_ps(-0.0f));
    return (vf)_mm256_or_ps(size, sign);
}

#define E4M3_UNIT 256.0f
INLINE vf widen_int8(const char *w)
{
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)w)));
}

INLINE vf widen_e4m3(const char *w)
{
    __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const void *)w)), 7);
    return (vf)_mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16((int16_t)~0x4000)));
}
#else
INLINE vf widen_e2m1(const char *w, i64 second)
{
    vi code = __builtin_convertvector(*(const vb *)w, vi);
    if (second) code = code >> 4;
    vi size = code & 7, is_small = size < 2, normal = (size << 22) + (126 << 23);
    vf small = __builtin_convertvector(size, vf) * 0.5f;
    return (vf)((is_small & (vi)small) | (~is_small & normal) | (code << 28 & (int32_t)0x80000000));
}

#define E4M3_UNIT 1.0f
INLINE vf widen_int8(const char *w)
{
    return __builtin_convertvector(__builtin_convertvector(*(const vb *)w, vi), vf);
}

INLINE vf widen_e4m3(const char *w)
{
    vi wide = __builtin_convertvector(*(const vb *)w, vi), bits = wide & 0x7f;
    vf normal = (vf)((bits << 20) + (120 << 23)), subnormal = __builtin_convertvector(bits, vf) * 0x1p-9f;
    vi is_small = bits < 8;
    return (vf)((is_small & (vi)subnormal) | (~is_small & (vi)normal) | (wide & (int32_t)0x80000000));
}
#endif

/* Powers of two out of their exponents as e8m0 has them; 255 is NaN. */
INLINE void widen_e8m0(const uint8_t *exponents, i64 count, float *scale)
{
    for (i64 i = 0; i < count; i++) {
        uint32_t e = exponents[i], bits = e == 0 ? 1u << 22 : e == 255 ? 0x7fc00000u : e << 23;
        memcpy(scale + i, &bits, 4);
    }
}

/* A register of weights at one k.
   w: where they lie; in BFLOAT16 and MXFP4 with those of the neighbour in k, `second` says which one is meant
   scale: E4M3 and MXFP4: of each column */
INLINE vf load_weights(const int kind, const int second, const char *w, const float *scale)
{
    switch (kind) {
    case FLOAT32: return *(const vf *)w;
    case BFLOAT16: return second ? (vf)(*(const vu *)w & 0xffff0000u) : (vf)(*(const vu *)w << 16);
    case INT8: return widen_int8(w);
    case MXFP4: return widen_e2m1(w, second) * *(const vf *)scale;
    default: return widen_e4m3(w) * *(const vf *)scale;
    }
}
