/* Weights rounded to codes in groups that share a scale, as quantise_groups of kernels/group_quantised.py does. */
#include "pool.h"
#include "vec.h"

enum { SHARES = 16 /* steps that are tried */ };

typedef struct {
    const float *weight, *shares; /* [rows, k], [SHARES] */
    uint8_t *codes;               /* [rows, k] */
    uint16_t *scales;             /* [rows, groups] float16 */
    i64 rows, k, group, low, high, pieces;
} QuantiseJob;

/* The nearest float16, halfway to even; the largest one for what is larger. */
INLINE uint16_t to_float16(float x)
{
    uint32_t bits, sign, half;
    float size = x < 0 ? -x : x;
    if (size > 65504.0f) size = 65504.0f;
    memcpy(&bits, &x, 4), sign = bits >> 16 & 0x8000;
    if (size < 0x1p-14f) { /* a number of steps of 2^-24, as those of a float32 from 0.5 on are */
        float sum = size + 0.5f;
        memcpy(&half, &sum, 4);
        return (uint16_t)(sign | (half - 0x3f000000u));
    }
    memcpy(&bits, &size, 4);
    return (uint16_t)(sign | (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
}

INLINE float from_float16(uint16_t half)
{
    uint32_t bits = (half & 0x7fffu) << 13;
    float size;
    memcpy(&size, &bits, 4);
    size *= 0x1p112f;
    return half & 0x8000 ? -size : size;
}

INLINE vf nearest_code(vf x, float inverse, vf low, vf high)
{
    vf magic = splat(12582912.0f), scaled = x * inverse;
    scaled = pick(scaled < low, low, pick(scaled > high, high, scaled));
    return (scaled + magic) - magic;
}

/* x: [group], with zeros behind what the row has */
static void quantise_group(const QuantiseJob *j, const float *x, uint8_t *codes, uint16_t *scale)
{
    float largest = 0, least_error = 0, inverse = 0;
    vf low = splat((float)j->low), high = splat((float)j->high);
    for (i64 i = 0; i < j->group; i++) {
        float size = x[i] < 0 ? -x[i] : x[i], most = largest < 0 ? -largest : largest;
        if (size > most) largest = x[i];
    }
    *scale = 0;
    for (i64 s = 0; s < SHARES && largest; s++) {
        uint16_t half = to_float16(largest * j->shares[s] / (float)j->low);
        float step = from_float16(half), by = step ? 1 / step : 0;
        vf errors[SPAN];
        for (int v = 0; v < SPAN; v++) errors[v] = (vf){};
        for (i64 i = 0; i < j->group; i += 16)
            UNROLL for (int v = 0; v < SPAN; v++) {
                vf values = *(const vf *)(x + i + v * VL);
                vf error = multiply_add(nearest_code(values, by, low, high), splat(step), -values);
                errors[v] = multiply_add(error, error, errors[v]);
            }
        float error = sum16(errors);
        if (!s || error < least_error) least_error = error, *scale = half, inverse = by;
    }
    for (i64 i = 0; i < j->group; i += VL) {
        vi code = __builtin_convertvector(nearest_code(*(const vf *)(x + i), inverse, low, high), vi) - (int32_t)j->low;
        for (int v = 0; v < VL; v++) codes[i + v] = (uint8_t)code[v];
    }
}

static void quantise_rows_piece(const void *job, i64 piece)
{
    const QuantiseJob *j = job;
    i64 groups = (j->k + j->group - 1) / j->group;
    for (i64 r = j->rows * piece / j->pieces; r < j->rows * (piece + 1) / j->pieces; r++)
        for (i64 g = 0; g < groups; g++) {
            _Alignas(64) float x[128];
            uint8_t codes[128];
            i64 at = r * j->k + g * j->group, count = least(j->group, j->k - g * j->group);
            memset(x, 0, sizeof x), memcpy(x, j->weight + at, count * 4);
            quantise_group(j, x, codes, j->scales + r * groups + g);
            memcpy(j->codes + at, codes, count);
        }
}

/* weight: [rows, k] float32 -> codes [rows, k], from 0 (which stands for `low`) to high - low, and scales [rows, ceil(k /
   group)] float16. group: 16, 32, 64 or 128;  shares: [SHARES] float32 */
i64 quantise_groups(const float *weight, i64 rows, i64 k, i64 group, i64 low, i64 high, const float *shares,
                    uint8_t *codes, uint16_t *scales)
{
    QuantiseJob job = {weight, shares, codes, scales, rows, k, group, low, high, 1};
    if (pool_threads() > 1) job.pieces = least(rows, 8 * pool_threads());
    pool_run(quantise_rows_piece, &job, job.pieces);
    return 0;
}
