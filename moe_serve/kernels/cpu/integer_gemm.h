/* x W^T of rows in int8 and weights in groups (groups.h), by products of integers.

   A row is quantised in chunks of 128 of k, each with a scale; beside codes of eight bits, whose own error is no larger,
   each group has one. The products of a group of weights are added as whole numbers, which is exact whatever the order,
   so each way below gives the same. What the groups of a chunk give is then added in order of k by fused multiply-adds of
   their scales, and the chunks by those of the row: one chain for each output, on every machine. */
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include "groups.h"

/* 128 of a row of k, in int8. scale: the first one is of all, or each of a group; sums: of each group of the weight */
typedef struct {
    int8_t q[GROUP_CHUNK];
    float scale[CHUNK_GROUPS];
    int32_t sums[CHUNK_GROUPS];
} RowChunk;

INLINE i64 row_chunks(i64 k) { return (k + GROUP_CHUNK - 1) / GROUP_CHUNK; }

/* How many of a row share a scale. */
INLINE i64 row_group(const Groups *g) { return g->bits == 8 ? g->group : GROUP_CHUNK; }
INLINE i64 by_integers(i64 kind, const Groups *g) { return kind == GROUPS && g->int8; }

/* Returns room for rows in int8. */
static RowChunk *row_chunks_room(i64 rows, i64 k)
{
    RowChunk *room = malloc(rows * row_chunks(k) * sizeof *room + 1);
    if (!room) {
        fprintf(stderr, "moe_serve: no memory for %lld rows in int8\n", (long long)rows);
        abort();
    }
    return room;
}

/* a * b + c, rounded once, also where the machine has no such instruction. */
INLINE vf exact_multiply_add(vf a, vf b, vf c)
{
#if defined(__FMA__) || defined(__aarch64__)
    return multiply_add(a, b, c);
#else
    UNROLL for (int i = 0; i < VL; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* a * b, rounded, which no compiler fuses with what is added. */
INLINE vf rounded_product(vf a, vf b)
{
    vf product = a * b;
#if defined(__x86_64__)
    __asm__("" : "+x"(product));
#elif defined(__aarch64__)
    __asm__("" : "+w"(product));
#endif
    return product;
}

/* Quantises floats that share a scale, a multiple of 16, and returns it: largest / 127; q = x (127 / largest) to the
   nearest, halfway to even. What is not finite makes the scale so. */
INLINE float quantise_floats(const float *from, i64 count, int8_t *to)
{
    vi most = {}; /* sizes as whole numbers are in the same order; NaN is the largest */
    for (i64 i = 0; i < count; i += VL) {
        vi size = *(const vi *)(from + i) & 0x7fffffff;
        most = (most & (most > size)) | (size & ~(most > size));
    }
    int32_t part[VL], largest_bits = 0;
    float largest;
    memcpy(part, &most, sizeof part);
    for (int i = 0; i < VL; i++) largest_bits = largest_bits > part[i] ? largest_bits : part[i];
    memcpy(&largest, &largest_bits, 4);
    if (largest < 0x1p-100f) largest = 0;
    vf by = splat(largest > 0 ? 127.0f / largest : 0), magic = splat(12582912.0f);
    for (i64 i = 0; i < count; i += 16)
        UNROLL for (int j = 0; j < SPAN; j++) {
            vi q = ((vi)(rounded_product(*(const vf *)(from + i + j * VL), by) + magic) << 24) >> 24; /* its lowest byte */
            *(vb *)(to + i + j * VL) = __builtin_convertvector(q, vb);
        }
    return largest / 127.0f;
}

/* Quantises a row, with zeros behind it, for weights in such groups. */
static __attribute__((noinline)) void quantise_row(const float *x, i64 k, const Groups *g, RowChunk *to)
{
    i64 shared = row_group(g);
    for (i64 start = 0; start < k; start += GROUP_CHUNK, to++) {
        _Alignas(64) float padded[GROUP_CHUNK];
        const float *from = x + start;
        if (k - start < GROUP_CHUNK) {
            memset(padded, 0, sizeof padded), memcpy(padded, from, (k - start) * 4);
            from = padded;
        }
        for (i64 i = 0; i < GROUP_CHUNK; i += shared)
            to->scale[i / shared] = quantise_floats(from + i, shared, to->q + i);
        for (i64 i = 0; i < GROUP_CHUNK; i += g->group) {
            int32_t sum = 0;
            for (i64 j = 0; j < g->group; j++) sum += to->q[i + j];
            to->sums[i / g->group] = sum;
        }
    }
}

/* ---- products of four int8 of a row, in every lane of x, with four codes of each column
   `small`: codes are below 64. part: what up to 32 of k have given so far; it begins as part_begin(total). */
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
enum { SIGNED_CODES = 0 };
#define HIGH_APART(R) ((R) <= 3) /* codes of upper halves stay there, and their sums are divided by 16 */
#else
enum { SIGNED_CODES = 128 /* what products of codes of eight bits have subtracted from each */ };
#define HIGH_APART(R) 0
#endif

INLINE vi part_begin(const int small, vi total)
{
#if (defined(__AVX512F__) && defined(__AVX512BW__) && !defined(__AVX512VNNI__)) || (defined(__AVX2__) && !defined(__AVX512F__))
    if (small) return (vi){};
#endif
    return total;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
/* Adds 16 of 16 bits. Written out, since compilers add in another order, for which they have not registers enough. */
INLINE void add_pairs(vi *part, __m256i pairs) { __asm__("vpaddw %1, %0, %0" : "+x"(*part) : "x"(pairs)); }
#endif

INLINE vi add_codes(const int small, vi part, vi codes, vi x)
{
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    return (vi)_mm512_dpbusd_epi32((__m512i)part, (__m512i)codes, (__m512i)x);
#elif defined(__AVX512F__) && defined(__AVX512BW__)
    if (small) return (vi)_mm512_add_epi16((__m512i)part, _mm512_maddubs_epi16((__m512i)codes, (__m512i)x));
    __m512i c = _mm512_xor_si512((__m512i)codes, _mm512_set1_epi8((char)0x80));
    __m512i signed_x = _mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask(c), _mm512_setzero_si512(), (__m512i)x);
    __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(c), signed_x);
    return part + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    if (small) {
        add_pairs(&part, _mm256_maddubs_epi16((__m256i)codes, (__m256i)x));
        return part;
    }
    __m256i c = _mm256_xor_si256((__m256i)codes, _mm256_set1_epi8((char)0x80));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8((__m256i)x, c));
    return part + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
    vi c = codes ^ (small ? 0 : (int32_t)0x80808080);
    return (vi)vdotq_s32((int32x4_t)part, (int8x16_t)c, (int8x16_t)x);
#elif defined(__aarch64__)
    int8x16_t c = (int8x16_t)(codes ^ (small ? 0 : (int32_t)0x80808080)), y = (int8x16_t)x;
    int16x8_t low = vmull_s8(vget_low_s8(c), vget_low_s8(y)), high = vmull_high_s8(c, y);
    return (vi)vpadalq_s16((int32x4_t)part, vpaddq_s16(low, high));
#else
    vi c = codes ^ (small ? 0 : (int32_t)0x80808080);
    UNROLL for (int i = 0; i < 4; i++) part += (c << (24 - 8 * i) >> 24) * (x << (24 - 8 * i) >> 24);
    return part;
#endif
}

INLINE vi part_added(const int small, vi total, vi part)
{
#if defined(__AVX512F__) && defined(__AVX512BW__) && !defined(__AVX512VNNI__)
    if (small) return total + (vi)_mm512_madd_epi16((__m512i)part, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    if (small) return total + (vi)_mm256_madd_epi16((__m256i)part, _mm256_set1_epi16(1));
#endif
    return part;
}

/* ---- tiles */

enum { CODES_4, CODES_6, CODES_8, CODES_4_APART, CODES_6_APART /* in bytes */ };
enum { MOST_INTEGER_ROWS = 4 };

/* Some rows by a panel, one chunk of k. */
typedef struct {
    const RowChunk *x[MOST_INTEGER_ROWS];
    float *y[MOST_INTEGER_ROWS];
    const Groups *groups;
    const GroupChunk *chunk;
    const char *codes; /* [k / 8][width][4], and for six bits [k / 16][width][4]; or [k / 4][width][4] */
    i64 width, more; /* more: goes on from what is in y */
} IntegerTile;

/* Four neighbours of a row in every lane. */
INLINE vi four_of(const int8_t *q)
{
    int32_t word;
    memcpy(&word, q, 4);
    return word - (vi){};
}

/* Where the codes of 16 of k lie, at the first column of a tile. upper: of codes of six bits, what is above four */
typedef struct { const char *words, *upper; } Codes16;

INLINE void fetch_ahead(const char *at) { __builtin_prefetch(at + PREFETCH, 0, 2); }

/* Returns the codes of register v of columns, of four k from the i-th of the 16 on. */
INLINE vi four_codes(const int codes_are, const int width, Codes16 at, const int v, const int i)
{
    const int halves = codes_are == CODES_4 || codes_are == CODES_6, place = v * VL * 4;
    const char *word = at.words + i / (halves ? 8 : 4) * width * 4 + place;
    vu codes = *(const vu *)word;
    if (!halves) {
        if (codes_are == CODES_8) fetch_ahead(word);
        return (vi)codes;
    }
    if (i % 8 == 0) fetch_ahead(word);
    codes = codes >> i % 8 & 0x0f0f0f0f;
    if (codes_are == CODES_4) return (vi)codes;
    vu upper = *(const vu *)(at.upper + place);
    if (i == 0) fetch_ahead(at.upper + place);
    return (vi)(codes | ((i < 8 ? upper << (4 - i / 2) : upper >> (i / 2 - 4)) & 0x30303030));
}

/* Adds the products of k from the `from`-th to the `until`-th of 16. q: of each row, of which the 16 begin at k */
INLINE void add_some(const int R, const int V, const int codes_are, const int width, Codes16 at, const int from,
                     const int until, const int8_t *const *q, i64 k, vi part[][8], vi high_part[][8])
{
    const int small = codes_are != CODES_8;
#if defined(__AVX2__) && !defined(__AVX512F__) /* 16 registers: one half of the codes after the other */
    UNROLL for (int i = from; i < until; i += 4) {
        vi c[8], x[MOST_INTEGER_ROWS];
        UNROLL for (int r = 0; r < R && R <= 2; r++) x[r] = four_of(q[r] + k + i);
        UNROLL for (int v = 0; v < V; v++) {
            c[v] = four_codes(codes_are, width, at, v, i);
            UNROLL for (int r = 0; r < R && R <= 2; r++) part[r][v] = add_codes(small, part[r][v], c[v], x[r]);
        }
        UNROLL for (int r = 0; r < R && R > 2; r++) {
            vi own = four_of(q[r] + k + i);
            UNROLL for (int v = 0; v < V; v++) part[r][v] = add_codes(small, part[r][v], c[v], own);
        }
    }
    (void)high_part;
#else
    const int step = codes_are == CODES_4 ? 8 : 4;
    UNROLL for (int i = from; i < until; i += step) {
        vi x[2][MOST_INTEGER_ROWS];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int half = 0; half < step / 4; half++)
                x[half][r] = four_of(q[r] + k + i + 4 * half);
        UNROLL for (int v = 0; v < V; v++) {
            vi low = four_codes(codes_are, width, at, v, i);
            UNROLL for (int r = 0; r < R; r++) part[r][v] = add_codes(small, part[r][v], low, x[0][r]);
            if (codes_are != CODES_4) continue;
            vi codes = *(const vi *)(at.words + i / 8 * width * 4 + v * VL * 4);
            vi high = HIGH_APART(R) ? codes & (int32_t)0xf0f0f0f0 : (vi)((vu)codes >> 4) & 0x0f0f0f0f;
            vi(*to)[8] = HIGH_APART(R) ? high_part : part;
            UNROLL for (int r = 0; r < R; r++) to[r][v] = add_codes(small, to[r][v], high, x[1][r]);
        }
    }
#endif
}

/* R rows by V registers of columns of a panel of so many, from column `first` on. */
INLINE void integer_tile(const int R, const int V, const int codes_are, const int width, const int step,
                         const IntegerTile *t, i64 first)
{
    const int small = codes_are != CODES_8, six = codes_are == CODES_6 || codes_are == CODES_6_APART;
    const int of_groups = codes_are == CODES_8; /* the scales of a row are */
    const int per_part = !small || six ? 8 : step; /* as many products of four codes below 16, or of two below 64, as int16 holds */
    const Groups *g = t->groups;
    const GroupChunk *chunk = t->chunk;
    const i64 k_bytes = codes_are == CODES_4 || codes_are == CODES_6 ? width / 2 : width; /* of one k */
    const int8_t *q[MOST_INTEGER_ROWS];
    i64 end = padded_to_32(chunk->k);
    Codes16 at16 = {t->codes + first * 4, t->codes + end * k_bytes + first * 4};
    int32_t subtracted = (g->zero < 0 ? 0 : (int32_t)g->zero) - (small ? 0 : SIGNED_CODES);
    vf inner[MOST_INTEGER_ROWS][8];
    UNROLL for (int r = 0; r < R; r++) {
        q[r] = t->x[r]->q;
        UNROLL for (int v = 0; v < V; v++) {
            inner[r][v] = (vf){};
            if (of_groups && t->more) inner[r][v] = *(const vf *)(t->y[r] + first + v * VL);
        }
    }
    for (i64 k = 0, group = 0; k < end; group++) {
        vi total[MOST_INTEGER_ROWS][8], part[MOST_INTEGER_ROWS][8], high[MOST_INTEGER_ROWS][8];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < V; v++)
                total[r][v] = -subtracted * t->x[r]->sums[group] - (vi){}, high[r][v] = (vi){};
        for (i64 until = least(k + g->group, end); k < until; k += step)
            UNROLL for (int i = 0; i < step; i += per_part) {
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int v = 0; v < V; v++) part[r][v] = part_begin(small, total[r][v]);
                UNROLL for (int from = 0; from < per_part; from += 16) {
                    const int within = (i + from) % 16, to = within + (per_part < 16 ? per_part : 16);
                    add_some(R, V, codes_are, width, at16, within, to, q, k + (i + from) / 16 * 16, part, high);
                    if (to == 16) at16.words += 16 * k_bytes, at16.upper += 4 * width;
                }
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int v = 0; v < V; v++) total[r][v] = part_added(small, total[r][v], part[r][v]);
            }
        if (HIGH_APART(R) && codes_are == CODES_4)
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < V; v++) total[r][v] += high[r][v] >> 4;
        i64 at = group * width + first;
        if (g->zero < 0)
            UNROLL for (int v = 0; v < V; v++) {
                vi zero = __builtin_convertvector(*(const vf *)(chunk->zero + at + v * VL), vi);
                UNROLL for (int r = 0; r < R; r++) total[r][v] -= zero * t->x[r]->sums[group];
            }
        UNROLL for (int v = 0; v < V; v++) {
            vf scale = *(const vf *)(chunk->scale + at + v * VL);
            UNROLL for (int r = 0; r < R; r++) {
                vf by = scale;
                if (of_groups) by *= splat(t->x[r]->scale[group]);
                inner[r][v] = exact_multiply_add(__builtin_convertvector(total[r][v], vf), by, inner[r][v]);
            }
        }
        if (g->has_minimum)
            UNROLL for (int v = 0; v < V; v++) {
                vf minimum = *(const vf *)(chunk->minimum + at + v * VL);
                UNROLL for (int r = 0; r < R; r++) {
                    float sum = (float)t->x[r]->sums[group] * (of_groups ? t->x[r]->scale[group] : 1);
                    inner[r][v] = exact_multiply_add(splat(-sum), minimum, inner[r][v]);
                }
            }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) {
            vf *y = (vf *)(t->y[r] + first + v * VL);
            if (of_groups) *y = inner[r][v];
            else *y = exact_multiply_add(inner[r][v], splat(t->x[r]->scale[0]), t->more ? *y : (vf){});
        }
}

#if defined(__AVX512F__)
#define INTEGER_V(R, CODES) 4 /* registers of columns in a tile */
#else
#define INTEGER_V(R, CODES) ((R) == 1 ? 4 : ((R) == 2 ? 4 : 2) / ((CODES) == CODES_4 ? 1 : 2))
#endif
#define INTEGER_TILE(R)                                                                                               \
    case R:                                                                                                           \
        for (i64 first = 0; first < PANEL; first += INTEGER_V(R, codes_are) * VL)                                     \
            integer_tile(R, INTEGER_V(R, codes_are), codes_are, PANEL, step, t, first);                               \
        break;
/* A panel of 32, of which a weight has one at most, goes row by row. */
#define INTEGER_TILES(name, CODES, STEP)                                                                              \
    static __attribute__((noinline)) void name(const IntegerTile *t, i64 rows)                                        \
    {                                                                                                                 \
        const int codes_are = CODES, step = STEP;                                                                     \
        if (t->width == PANEL) switch (rows) { INTEGER_TILE(1) INTEGER_TILE(2) INTEGER_TILE(3) INTEGER_TILE(4) }       \
        else for (i64 r = 0; r < rows; r++) {                                                                         \
            IntegerTile one = *t;                                                                                     \
            one.x[0] = t->x[r], one.y[0] = t->y[r];                                                                   \
            for (i64 first = 0; first < 32; first += 2 * VL) integer_tile(1, 2, codes_are, 32, step, &one, first);        \
        }                                                                                                             \
    }
INTEGER_TILES(codes_4_of_16, CODES_4, 16)
INTEGER_TILES(codes_4_of_32, CODES_4, 32)
INTEGER_TILES(codes_6, CODES_6, 16)
INTEGER_TILES(codes_6_apart, CODES_6_APART, 16)
INTEGER_TILES(codes_8, CODES_8, 16)
static void codes_4(const IntegerTile *t, i64 rows) { (t->groups->group < 32 ? codes_4_of_16 : codes_4_of_32)(t, rows); }

/* Writes codes of four bits to bytes: [k / 4][width][4] */
static void codes_apart(const char *codes, i64 k, i64 line, char *to)
{
    for (i64 at = 0; at < k / 8 * line; at += line, to += 2 * line)
        for (i64 c = 0; c < line; c += VL * 4) {
            vi both = *(const vi *)(codes + at + c);
            __builtin_prefetch(codes + at + c + PREFETCH, 0, 2);
            *(vi *)(to + c) = both & 0x0f0f0f0f, *(vi *)(to + line + c) = (vi)((vu)both >> 4) & 0x0f0f0f0f;
        }
}

/* ---- many rows by codes of four bits that lie apart */

#if defined(__AVX2__) && !defined(__AVX512F__)
enum { APART_V = 2 /* registers of columns in a tile */ };

/* Writes the products of codes and R rows, added up for each group of the chunk: [groups][R][APART_V] registers. */
INLINE void apart_sums(const int R, const IntegerTile *t, i64 first, vi *to)
{
    i64 end = padded_to_32(t->chunk->k), group = t->groups->group, step = least(group, 32), line = t->width * 4;
    const int8_t *q[MOST_INTEGER_ROWS];
    const char *codes = t->codes + first * 4;
    UNROLL for (int r = 0; r < R; r++) q[r] = t->x[r]->q;
    for (i64 k = 0, until; k < end; to += R * APART_V) {
        i64 from = k;
        for (until = least(k + group, end); k < until;) {
            vi part[MOST_INTEGER_ROWS][APART_V];
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < APART_V; v++) part[r][v] = (vi){};
            for (i64 part_end = k + step; k < part_end; k += 16)
                UNROLL for (int i = 0; i < 16; i += 4, codes += line) {
                    vi c[APART_V];
                    UNROLL for (int v = 0; v < APART_V; v++) c[v] = *(const vi *)(codes + v * VL * 4);
                    UNROLL for (int r = 0; r < R; r++) {
                        vi x = four_of(q[r] + k + i);
                        UNROLL for (int v = 0; v < APART_V; v++) part[r][v] = add_codes(1, part[r][v], c[v], x);
                    }
                }
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < APART_V; v++) {
                    vi *sum = to + r * APART_V + v, before = from + step < k ? *sum : (vi){};
                    *sum = part_added(1, before, part[r][v]);
                }
        }
    }
}

/* As integer_tile. Sums of groups are whole before they meet the scales, since 16 registers have no room for both. */
INLINE void apart_tile(const int R, const IntegerTile *t, i64 first)
{
    const Groups *g = t->groups;
    const GroupChunk *chunk = t->chunk;
    vi sums[CHUNK_GROUPS * MOST_INTEGER_ROWS * APART_V];
    vf inner[MOST_INTEGER_ROWS][APART_V];
    float less[MOST_INTEGER_ROWS][CHUNK_GROUPS];
    apart_sums(R, t, first, sums);
    UNROLL for (int r = 0; r < R; r++) {
        *(vf *)less[r] = -__builtin_convertvector(*(const vi *)t->x[r]->sums, vf);
        UNROLL for (int v = 0; v < APART_V; v++) inner[r][v] = (vf){};
    }
    for (i64 group = 0; group < chunk->groups; group++)
        UNROLL for (int v = 0; v < APART_V; v++) {
            i64 at = group * t->width + first + v * VL;
            vf scale = *(const vf *)(chunk->scale + at), zero = splat((float)g->zero), minimum = scale;
            if (g->zero < 0) zero = *(const vf *)(chunk->zero + at);
            if (g->has_minimum) minimum = *(const vf *)(chunk->minimum + at);
            UNROLL for (int r = 0; r < R; r++) {
                vf total = __builtin_convertvector(sums[(group * R + r) * APART_V + v], vf);
                vf sum = splat(less[r][group]);
                if (g->zero) total = multiply_add(sum, zero, total); /* whole numbers below 2^24 */
                inner[r][v] = multiply_add(total, scale, inner[r][v]);
                if (g->has_minimum) inner[r][v] = multiply_add(sum, minimum, inner[r][v]);
            }
        }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < APART_V; v++) {
            vf *y = (vf *)(t->y[r] + first + v * VL);
            *y = multiply_add(inner[r][v], splat(t->x[r]->scale[0]), t->more ? *y : (vf){});
        }
}

static __attribute__((noinline)) void codes_4_apart(const IntegerTile *t, i64 rows)
{
    for (i64 first = 0; first < t->width; first += APART_V * VL)
        switch (rows) { /* several blocks of rows have 2 each or more, being cut evenly */
        case 2: apart_tile(2, t, first); break;
        case 3: apart_tile(3, t, first); break;
        case 4: apart_tile(4, t, first); break;
        }
}
#else
INTEGER_TILES(codes_4_apart, CODES_4_APART, 16)
#endif

/* y[r][0 .. width) = x[r] W^T. x: [rows], row_chunks(k) each */
static __attribute__((noinline)) void integer_product(const Panel *p, i64 rows, const RowChunk *const *x, float *const *y)
{
    _Alignas(64) char apart[GROUP_CHUNK * PANEL];
    GroupChunk chunk;
    const Groups *g = p->groups;
    i64 blocks = (rows + MOST_INTEGER_ROWS - 1) / MOST_INTEGER_ROWS;
    for (i64 r = 0; r < rows && !p->k; r++) memset(y[r], 0, p->width * 4);
    for (i64 start = 0; start < p->k; start += GROUP_CHUNK) {
        read_chunk(p, start, &chunk);
        /* Lines are fetched ahead one by one, beside the work on others: those of scales here, those of codes there. */
        const char *at = p->w + start / GROUP_CHUNK * chunk_bytes(g, GROUP_CHUNK) * p->width;
        i64 bytes = code_bytes(g, chunk.k) * p->width, scales = chunk_bytes(g, chunk.k) * p->width - bytes, is_apart = g->bits < 8 && blocks > 1;
        for (i64 line = 0; line < scales; line += 64) __builtin_prefetch(at + PREFETCH + line, 0, 2);
        if (is_apart) (g->bits == 4 ? codes_apart : six_bits_to_bytes)(chunk.codes, padded_to_32(chunk.k), p->width * 4, apart);
        for (i64 b = 0; b < blocks; b++) {
            i64 from = rows * b / blocks, count = rows * (b + 1) / blocks - from;
            IntegerTile t = {.groups = g, .chunk = &chunk, .codes = is_apart ? apart : chunk.codes, .width = p->width,
                             .more = start};
            for (i64 r = 0; r < count; r++) t.x[r] = x[from + r] + start / GROUP_CHUNK, t.y[r] = y[from + r];
            if (g->bits == 8) codes_8(&t, count);
            else if (g->bits == 6) (is_apart ? codes_6_apart : codes_6)(&t, count);
            else (is_apart ? codes_4_apart : codes_4)(&t, count);
        }
    }
}
