/* Weights of four, six or eight bits, of which neighbours in k share a scale (kernels/group_quantised.py):

       value = scale (code - zero) - minimum

   A panel lies in chunks of 128 of k: for each column, in two levels, the upper factor of scales, then of minimums; then
   for each group the scales, minimums and zero points of its columns; then the codes. A column's word of 32 bits holds
   the codes of four k, or of eight: those of the first four in the lower halves of its bytes. Codes of the last chunk go
   on to a multiple of 32 of k. Codes of six bits lie as the lower four of all of them, then words with the upper two of
   sixteen k: those of every fourth one side by side in a byte. */
#pragma once
#include "gemm.h"

enum { GROUP_CHUNK = 128, CHUNK_GROUPS = GROUP_CHUNK / 16 /* of a chunk */, CODE_STEP = 32 };
enum { SCALES_FLOAT32, SCALES_FLOAT16, SCALES_BFLOAT16, SCALES_TWO_LEVELS, WIDE_BYTE /* unsigned */ }; /* as in packed.py */

typedef struct Groups { /* as packed.py fills it */
    i64 bits, group, scale, zero /* of all codes, or -1: of each group */, has_minimum;
    i64 int8; /* whether activations are quantised, and products are of integers */
} Groups;

INLINE i64 scale_bytes(const Groups *g) { return g->scale == SCALES_FLOAT32 ? 4 : g->scale == SCALES_TWO_LEVELS ? 1 : 2; }
INLINE i64 groups_of(const Groups *g, i64 k) { return (k + g->group - 1) / g->group; }
INLINE i64 code_bytes(const Groups *g, i64 k) { return padded_to_32(k) * g->bits / 8; }

/* Bytes of a column's k in one chunk, and in all of them. */
INLINE i64 chunk_bytes(const Groups *g, i64 k)
{
    i64 scales = 1 + g->has_minimum, supers = g->scale == SCALES_TWO_LEVELS ? 2 * scales : 0;
    return supers + groups_of(g, k) * (scales * scale_bytes(g) + (g->zero < 0)) + code_bytes(g, k);
}

INLINE i64 group_bytes(const Groups *g, i64 k)
{
    i64 rest = k % GROUP_CHUNK;
    return k / GROUP_CHUNK * chunk_bytes(g, GROUP_CHUNK) + (rest ? chunk_bytes(g, rest) : 0);
}

/* A float16 that is finite. */
INLINE vf widen_float16(const char *from)
{
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
#else
    typedef uint16_t vh __attribute__((vector_size(VL * 2), aligned(1), may_alias));
    vu bits = __builtin_convertvector(*(const vh *)from, vu);
    vf size = (vf)((bits & 0x7fff) << 13) * 0x1p112f; /* a subnormal one, too */
    return (vf)((vu)size | (bits & 0x8000) << 16);
#endif
}

INLINE vf widen_byte(const char *from)
{
#if defined(__AVX512F__) /* of which compilers make many instructions */
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from)));
#else
    typedef uint8_t vub __attribute__((vector_size(VL), aligned(1), may_alias));
    return __builtin_convertvector(__builtin_convertvector(*(const vub *)from, vi), vf);
#endif
}

INLINE vf widen_number(const int kind, const char *from)
{
    typedef uint16_t vh __attribute__((vector_size(VL * 2), aligned(1), may_alias));
    switch (kind) {
    case SCALES_FLOAT32: return *(const vf *)from;
    case SCALES_FLOAT16: return widen_float16(from);
    case SCALES_BFLOAT16: return (vf)(__builtin_convertvector(*(const vh *)from, vu) << 16);
    case SCALES_TWO_LEVELS: return widen_int8(from);
    default: return widen_byte(from);
    }
}

/* Widens numbers, times their factors [columns] if there are any. */
INLINE void widen_by(const int kind, const char *from, i64 size, const float *factors, i64 columns, i64 count, float *to)
{
    for (i64 i = 0; i < count; i += columns)
        for (i64 c = 0; c < columns; c += VL) {
            vf v = widen_number(kind, from + (i + c) * size);
            if (factors) v *= *(const vf *)(factors + c);
            *(vf *)(to + i + c) = v;
        }
}

static __attribute__((noinline)) void widen_numbers(i64 kind, const char *from, const float *factors, i64 columns, i64 count, float *to)
{
    switch (kind) {
    case SCALES_FLOAT32: widen_by(SCALES_FLOAT32, from, 4, factors, columns, count, to); break;
    case SCALES_FLOAT16: widen_by(SCALES_FLOAT16, from, 2, factors, columns, count, to); break;
    case SCALES_BFLOAT16: widen_by(SCALES_BFLOAT16, from, 2, factors, columns, count, to); break;
    case SCALES_TWO_LEVELS: widen_by(SCALES_TWO_LEVELS, from, 1, factors, columns, count, to); break;
    default: widen_by(WIDE_BYTE, from, 1, factors, columns, count, to);
    }
}

/* A chunk of a panel, with its numbers widened. */
typedef struct {
    const char *codes;
    i64 k, groups;
    _Alignas(64) float scale[CHUNK_GROUPS * PANEL], minimum[CHUNK_GROUPS * PANEL], zero[CHUNK_GROUPS * PANEL]; /* [group][width] */
} GroupChunk;

/* Writes codes of six bits as bytes: [k / 4][width][4] */
static void six_bits_to_bytes(const char *codes, i64 k, i64 line, char *to)
{
    const char *upper = codes + k / 8 * line;
    for (i64 w = 0; w < k / 4; w += 4)
        for (i64 c = 0; c < line; c += VL * 4) {
            vu high = *(const vu *)(upper + w / 4 * line + c);
            __builtin_prefetch(codes + PREFETCH + w / 2 * line + c, 0, 2);
            __builtin_prefetch(codes + PREFETCH + (w / 2 + 1) * line + c, 0, 2);
            __builtin_prefetch(upper + PREFETCH + w / 4 * line + c, 0, 2);
            UNROLL for (int i = 0; i < 4; i++) {
                vu low = *(const vu *)(codes + (w + i) / 2 * line + c);
                vu both = (low >> 4 * (i % 2) & 0x0f0f0f0f) | ((i < 2 ? high << (4 - 2 * i) : high >> (2 * i - 4)) & 0x30303030);
                *(vu *)(to + (w + i) * line + c) = both;
            }
        }
}

static __attribute__((noinline)) void read_chunk(const Panel *p, i64 start, GroupChunk *chunk)
{
    const Groups *g = p->groups;
    const char *at = p->w + start / GROUP_CHUNK * chunk_bytes(g, GROUP_CHUNK) * p->width;
    i64 two = g->scale == SCALES_TWO_LEVELS, kind = g->scale;
    float upper[2][PANEL], *factors[2] = {two ? upper[0] : 0, two ? upper[1] : 0};
    chunk->k = least(GROUP_CHUNK, p->k - start), chunk->groups = groups_of(g, chunk->k);
    i64 count = chunk->groups * p->width;
    for (i64 i = 0; two && i <= g->has_minimum; i++, at += 2 * p->width)
        widen_numbers(SCALES_FLOAT16, at, 0, p->width, p->width, upper[i]);
    widen_numbers(kind, at, factors[0], p->width, count, chunk->scale), at += count * scale_bytes(g);
    if (g->has_minimum) {
        widen_numbers(two ? WIDE_BYTE : kind, at, factors[1], p->width, count, chunk->minimum);
        at += count * scale_bytes(g);
    }
    if (g->zero < 0) widen_numbers(WIDE_BYTE, at, 0, p->width, count, chunk->zero), at += count;
    chunk->codes = at;
}

/* Writes codes of six bits as bytes, where a chunk has such, and takes them from there. bytes: [GROUP_CHUNK * width] */
INLINE void widen_six_bits(const Panel *p, GroupChunk *chunk, char *bytes)
{
    if (p->groups->bits != 6) return;
    six_bits_to_bytes(chunk->codes, padded_to_32(chunk->k), p->width * 4, bytes);
    chunk->codes = bytes;
}

_Static_assert(GROUP_CHUNK % WIDE_K == 0 && WIDE_K % CODE_STEP == 0, "blocks of k divide a chunk");

/* Widens the values of `depth` k from `first` of a chunk on: [depth to a multiple of 8][width] */
INLINE void widen_values(const int bits, const Groups *g, const GroupChunk *chunk, i64 width, i64 first, i64 depth, float *to)
{
    const int per_word = 32 / bits;
    for (i64 k = first; k < first + depth; k += per_word, to += per_word * width) {
        const char *words = chunk->codes + k * bits / 8 * width;
        i64 of_group = k / g->group * width;
        for (i64 line = 0; line < 4 * width; line += 64) __builtin_prefetch(words + PREFETCH / 2 + line, 0, 2);
        for (i64 c = 0; c < width; c += VL) {
            vu codes = *(const vu *)(words + c * 4);
            vf scale = *(const vf *)(chunk->scale + of_group + c), minimum = scale, zero = splat((float)g->zero);
            if (g->has_minimum) minimum = *(const vf *)(chunk->minimum + of_group + c);
            if (g->zero < 0) zero = *(const vf *)(chunk->zero + of_group + c);
            UNROLL for (int i = 0; i < per_word; i++) {
                int at = bits == 8 ? 8 * i : i < 4 ? 8 * i : 8 * (i - 4) + 4;
                vf code = __builtin_convertvector((vi)(codes >> at & (bits == 8 ? 255 : 15)), vf) - zero;
                if (g->has_minimum) *(vf *)(to + i * width + c) = multiply_add(code, scale, -minimum);
                else *(vf *)(to + i * width + c) = code * scale;
            }
        }
    }
}

static __attribute__((noinline)) void wide_tiles(const Tile *t, i64 rows)
{
    const int kind = FLOAT32, way = AGAIN;
    if (t->width == PANEL) switch (rows) { UP_TO_6(64) }
    else switch (rows) { UP_TO_6(32) }
}

/* As panel_product, of float activations: the chain of fused multiply-adds of the weight's values. */
static __attribute__((noinline)) void values_product(const Panel *p, const Rows *g)
{
    _Alignas(64) float wide[WIDE_K * PANEL];
    _Alignas(64) char bytes[GROUP_CHUNK * PANEL];
    GroupChunk chunk;
    i64 blocks = row_blocks(g->rows);
    for (i64 r = 0; r < g->rows && !p->k; r++) memset(g->y[r], 0, p->width * 4);
    for (i64 start = 0; start < p->k; start += WIDE_K) {
        if (start % GROUP_CHUNK == 0) read_chunk(p, start, &chunk), widen_six_bits(p, &chunk, bytes);
        i64 depth = least(WIDE_K, p->k - start), first = start % GROUP_CHUNK;
        if (p->groups->bits == 4) widen_values(4, p->groups, &chunk, p->width, first, depth, wide);
        else widen_values(8, p->groups, &chunk, p->width, first, depth, wide);
        for (i64 b = 0; b < blocks; b++) {
            i64 from = g->rows * b / blocks, rows = g->rows * (b + 1) / blocks - from;
            Tile t = {.width = p->width, .k = depth, .more = start, .w = (const char *)wide, .ahead = (const char *)wide,
                      .scale = chunk.scale, .wide = wide, .x_step = g->packed ? MOST_ROWS : 1};
            for (i64 r = 0; r < rows; r++) {
                t.x[r] = g->packed ? g->packed + (start * blocks + b * depth) * MOST_ROWS + r : g->x[from + r] + start;
                t.y[r] = g->y[from + r];
            }
            wide_tiles(&t, rows);
        }
    }
}

/* As panel_product, of weights of any kind. */
INLINE void product_of_floats(const Panel *p, const Rows *g)
{
    if (p->kind == GROUPS) values_product(p, g);
    else panel_product(p, g);
}

INLINE i64 weight_bytes(i64 n, i64 k, i64 kind, const Groups *g)
{
    return kind == GROUPS ? padded_to_32(n) * group_bytes(g, k) : packed_bytes(n, k, kind);
}

INLINE const char *weight_panel(const void *w, i64 panel, i64 k, i64 kind, const Groups *g)
{
    return kind == GROUPS ? (const char *)w + panel * PANEL * group_bytes(g, k) : panel_at(w, panel, k, kind);
}
