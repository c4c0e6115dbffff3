/* Vectors by the extensions of GCC and clang. VL floats are one register of this machine; a v16 is one, two or four
   registers, so code written with v16 has the same bits on every machine with fused multiply-add. */
#pragma once
#include <stdint.h>
#include <string.h>

typedef int64_t i64;
typedef int32_t i32;
_Static_assert(sizeof(void *) == sizeof(i64), "the kernels need a 64-bit machine");

#if defined(__AVX512F__)
enum { VL = 16, FORM = 0 };
#elif defined(__AVX2__) && defined(__FMA__)
enum { VL = 8, FORM = 1 };
#elif defined(__aarch64__)
enum { VL = 4, FORM = 2 };
#else
enum { VL = 4, FORM = 3 }; /* without fused multiply-add: other bits */
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#pragma clang fp contract(fast) /* as GCC does by itself; as an option, sampling.c could not turn it off */
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float vf __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16x __attribute__((vector_size(64), aligned(4), may_alias));

enum { SPAN = 16 / VL }; /* registers of a v16. One that a loop carries is slow where it is more than one. */

INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }

/* sum + a * b, rounded once. Written out, since GCC otherwise moves the sums of a large tile between registers. */
INLINE void add_product(vf *sum, vf a, vf b)
{
#if defined(__AVX512F__)
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(*sum) : "v"(a), "v"(b));
#elif defined(__FMA__)
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b));
#else
    *sum += a * b;
#endif
}

INLINE vf splat(float a) { return a - (vf){}; }

/* Adds the 16 floats as a tree. */
INLINE float sum16(v16 v)
{
    float part[16];
    memcpy(part, &v, 64);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* Returns the largest of 16 floats, none of them NaN. */
INLINE float max16(v16 v)
{
    float part[16];
    memcpy(part, &v, 64);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] = part[i] > part[i + half] ? part[i] : part[i + half];
    return part[0];
}

INLINE vf pick(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE v16 pick16(i16x mask, v16 a, v16 b) { return (v16)((mask & (i16x)a) | (~mask & (i16x)b)); }

/* The first `count` < 16 floats, zeros behind them. */
INLINE v16 load_some(const float *x, i64 count)
{
    v16 v = {};
    memcpy(&v, x, count * 4);
    return v;
}

INLINE void store_some(float *x, v16 v, i64 count) { memcpy(x, &v, count * 4); }

/* exp as 2^n * p(r), |r| <= ln2 / 2: relative error below 2e-7 from -87 to 88, where x is clamped. */
INLINE vf exp_vf(vf x)
{
    vf low = (vf){} - 87.0f, high = (vf){} + 88.0f;
    x = pick(x < low, low, x);
    x = pick(x > high, high, x);
    vf magic = (vf){} + 12582912.0f, n = (x * 1.44269504f + magic) - magic;
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = (vf){} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return (vf)((vi)p + (__builtin_convertvector(n, vi) << 23));
}

INLINE v16 exp16(v16 x)
{
    vf part[SPAN];
    memcpy(part, &x, sizeof part);
    UNROLL for (int i = 0; i < SPAN; i++) part[i] = exp_vf(part[i]);
    memcpy(&x, part, sizeof part);
    return x;
}
