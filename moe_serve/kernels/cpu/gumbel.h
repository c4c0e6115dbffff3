/* Random numbers, logarithms and weights of tokens, VL at a time or one by one. All of it is integers and float64
   additions, multiplications and divisions that are rounded one by one, so that torch computes the same bits
   (kernels/sampling.py). sampling.c includes this where contraction into fused multiply-adds is off. */
#pragma once
#include "vec.h"
typedef int32_t vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint64_t vq __attribute__((vector_size(VL * 4), aligned(4), may_alias)); /* VL / 2 lanes */
typedef double vd __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef float vf_half __attribute__((vector_size(VL * 2), aligned(4), may_alias));
enum { ROUNDS = 10, LANES = VL / 2, PARTS = VL == 16 ? 4 : 2, BLOCK = PARTS * LANES };

/* Products of the low halves of each lane: 32 x 32 bits. */
INLINE vq multiply_low(vq a, vq b)
{
#if defined(__AVX512F__)
    return (vq)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vq)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return (vq)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
    return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

/* What philox4x32-10 needs of a row: its keys, and the output index, which is the second counter word. */
typedef struct {
    uint64_t keys[ROUNDS][2], output_index;
} Philox;

static Philox philox_of(i64 seed, i64 output_index)
{
    Philox philox = {.output_index = (uint32_t)output_index};
    for (uint32_t round = 0; round < ROUNDS; round++) {
        philox.keys[round][0] = (uint32_t)((uint64_t)seed + round * 0x9E3779B9u);
        philox.keys[round][1] = (uint32_t)(((uint64_t)seed >> 32) + round * 0xBB67AE85u);
    }
    return philox;
}

/* The first two words for BLOCK ids from `first` on: registers of even and of odd ids in turn, since a product takes 64
   bits. Several registers at once hide the latency of the products. Upper halves of lanes hold rubbish till the end. */
INLINE void philox_block(const Philox *philox, i64 first, vu words[2][BLOCK / VL])
{
    vq c0[PARTS], c1[PARTS], c2[PARTS], c3[PARTS], ids;
    for (int lane = 0; lane < LANES; lane++) ids[lane] = 2 * lane;
    UNROLL
    for (int part = 0; part < PARTS; part++) {
        c0[part] = ids + (uint64_t)(first + part / 2 * VL + part % 2);
        c1[part] = (vq){} + philox->output_index;
        c2[part] = c3[part] = (vq){};
    }
    UNROLL
    for (int round = 0; round < ROUNDS; round++)
        UNROLL
        for (int part = 0; part < PARTS; part++) {
            vq product0 = multiply_low(c0[part], (vq){} + 0xD2511F53u);
            vq product1 = multiply_low(c2[part], (vq){} + 0xCD9E8D57u);
            c0[part] = (product1 >> 32) ^ c1[part] ^ philox->keys[round][0];
            c2[part] = (product0 >> 32) ^ c3[part] ^ philox->keys[round][1];
            c1[part] = product1, c3[part] = product0;
        }
    UNROLL
    for (int part = 0; part < PARTS; part += 2) {
        words[0][part / 2] = (vu)((c0[part] & 0xFFFFFFFFu) | (c0[part + 1] << 32));
        words[1][part / 2] = (vu)((c1[part] & 0xFFFFFFFFu) | (c1[part + 1] << 32));
    }
}

/* ln of a positive, normal x = 2^e * m with m from sqrt(1/2) to sqrt(2), by the series of atanh (fdlibm's numbers). */
INLINE double log_of(double x)
{
    int64_t bits, exponent;
    double m;
    memcpy(&bits, &x, 8);
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52;
    bits -= exponent * (1ll << 52);
    memcpy(&m, &bits, 8);
    double s = (m - 1.0) / (m + 1.0), z = s * s;
    double r = z * 1.479819860511658591e-01 + 1.531383769920937332e-01;
    r = r * z + 1.818357216161805012e-01;
    r = r * z + 2.222219843214978396e-01;
    r = r * z + 2.857142874366239149e-01;
    r = r * z + 3.999999999940941908e-01;
    r = r * z + 6.666666666666735130e-01;
    return (double)exponent * 0.69314718055994530942 + s * (r * z + 2.0);
}

/* Gumbel(0, 1) of 53 random bits; the uniform number is in (0, 1), never an end: the last one, which no float64 below 1
   is near enough, stays below it. */
INLINE double gumbel_of(uint32_t word0, uint32_t word1)
{
    uint64_t bits = ((uint64_t)(word0 >> 5) << 26) + (word1 >> 6);
    double uniform = ((double)bits + 0.5) * 0x1p-53, most = 1.0 - 0x1p-53;
    uniform = uniform < most ? uniform : most;
    return -log_of(-log_of(uniform));
}

/* exp(s) in units of 2^-40, rounded, for s <= 0, by a series that is accurate to 3e-10: an integer, so that sums of
   weights are exact in any order. */
INLINE vq weights_of(vd s)
{
    const vd least = (vd){} - 40.0, shift = (vd){} + 6755399441055744.0, one = (vd){} + 4503599627370496.0;
    s = (vd)(((vq)s & (vq)(s > least)) | ((vq)least & ~(vq)(s > least)));
    vd shifted = s * 1.44269504088896340736 + shift, r = s - (shifted - shift) * 0.69314718055994530942;
    vd p = r * (1.0 / 40320) + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    vd scaled = (vd)((vq)p + ((vq)shifted << 52) + (40ull << 52)); /* p * 2^(n + 40) */
    return (vq)(scaled + one) - (vq)one;
}
