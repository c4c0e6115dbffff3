/* Vectors by the extensions of GCC and clang. VL floats are one register of this machine; SPAN registers hold 16 floats.
   Code that adds up goes by 16 floats, so it has the same bits on every machine with fused multiply-add. No vector is
   wider than a register: compilers keep such a one in memory. */
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

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

enum { SPAN = 16 / VL };

/* Whether this is one of AMD's processors, which want other distances of what is fetched ahead than Intel's. */
static int is_amd;
#if defined(__x86_64__)
__attribute__((constructor)) static void look_at_processor(void)
{
    __builtin_cpu_init();
    is_amd = __builtin_cpu_is("amd");
}
#endif

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

/* a * b + c, rounded once. Written out where bits count, since compilers fuse only what they find side by side. */
INLINE vf multiply_add(vf a, vf b, vf c)
{
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vf splat(float a) { return a - (vf){}; }

/* Adds 16 floats as a tree. */
INLINE float sum16(const vf sum[SPAN])
{
    float part[16];
    memcpy(part, sum, 64);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* Returns the largest, where none is NaN. */
INLINE float highest(vf v)
{
    float part[VL];
    memcpy(part, &v, sizeof part);
    for (int half = VL / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] = part[i] > part[i + half] ? part[i] : part[i + half];
    return part[0];
}

INLINE vf pick(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

/* Register j of 16 floats, of which the first `count` exist; zeros for the others. */
INLINE vf get(const float *x, int j, i64 count)
{
    vf v = {};
    if (count >= (j + 1) * VL) return *(const vf *)(x + j * VL);
    if (count > j * VL) memcpy(&v, x + j * VL, (count - j * VL) * 4);
    return v;
}

INLINE void put(float *x, int j, vf v, i64 count)
{
    if (count >= (j + 1) * VL) *(vf *)(x + j * VL) = v;
    else if (count > j * VL) memcpy(x + j * VL, &v, (count - j * VL) * 4);
}

/* Runs the statements for registers j of the 16 floats from i on, for every i; `count` floats are there, which is a
   constant but at the end of the n floats. */
#define BY_REGISTER(n, ...)                                                                                            \
    {                                                                                                                  \
        i64 i = 0;                                                                                                     \
        for (const i64 count = 16; i + count <= (n); i += count) UNROLL for (int j = 0; j < SPAN; j++) { __VA_ARGS__ } \
        const i64 count = (n) - i;                                                                                     \
        if (count) UNROLL for (int j = 0; j < SPAN; j++) { __VA_ARGS__ }                                               \
    }

/* exp as 2^n * p(r), |r| <= ln2 / 2: relative error below 2e-7 from -87 to 88, where x is clamped. */
INLINE vf exp_vf(vf x)
{
    vf low = (vf){} - 87.0f, high = (vf){} + 88.0f;
    x = pick(x < low, low, x);
    x = pick(x > high, high, x);
    vf magic = splat(12582912.0f), n = multiply_add(x, splat(1.44269504f), magic) - magic;
    vf r = multiply_add(n, splat(-0.693359375f), x);
    r = multiply_add(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = multiply_add(p, r, splat(1.3981999507e-3f));
    p = multiply_add(p, r, splat(8.3334519073e-3f));
    p = multiply_add(p, r, splat(4.1665795894e-2f));
    p = multiply_add(p, r, splat(1.6666665459e-1f));
    p = multiply_add(p, r, splat(5.0000001201e-1f));
    p = multiply_add(p, r * r, r) + 1.0f;
    return (vf)((vi)p + (__builtin_convertvector(n, vi) << 23));
}
