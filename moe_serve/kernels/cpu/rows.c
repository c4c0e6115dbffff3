/* What happens to single rows: norms, rotary embedding with the cache's write, weighted sums, packing by slot.
   A row's bits depend on that row only: sums go over every 16th element, in an order that the width alone fixes. */
#include <math.h>
#include "cached.h"
#include "pool.h"

enum { PIECE_FLOATS = 1 << 15 }; /* fewer are not worth another thread */

INLINE i64 rows_of_piece(i64 width) { return width < PIECE_FLOATS ? PIECE_FLOATS / (width + 1) + 1 : 1; }
INLINE i64 pieces_of(i64 rows, i64 width) { return (rows + rows_of_piece(width) - 1) / rows_of_piece(width); }

INLINE float as_float(i64 bits)
{
    double number;
    memcpy(&number, &bits, 8);
    return (float)number;
}

/* Adds 64 sums, 16 by 16, then as the tree of sum16. */
INLINE float sum64(const vf part[64 / VL])
{
    vf sum[SPAN];
    UNROLL for (int j = 0; j < SPAN; j++)
        sum[j] = (part[j] + part[SPAN + j]) + (part[2 * SPAN + j] + part[3 * SPAN + j]);
    return sum16(sum);
}

INLINE float inverse_rms(const float *x, i64 n, float eps)
{
    vf sum[64 / VL] = {};
    i64 whole = n / 64 * 64;
    for (i64 i = 0; i < whole; i += 64)
        UNROLL for (int j = 0; j < 64 / VL; j++) {
            vf v = *(const vf *)(x + i + VL * j);
            sum[j] = multiply_add(v, v, sum[j]);
        }
    BY_REGISTER(n - whole, vf v = get(x + whole + i, j, count); sum[j] = multiply_add(v, v, sum[j]);)
    return 1 / sqrtf(sum64(sum) / (float)n + eps);
}

static void norm_row(const float *x, const float *weight, i64 n, float eps, float *y)
{
    float by = inverse_rms(x, n, eps); /* y may be x */
    BY_REGISTER(n, put(y + i, j, get(x + i, j, count) * by * get(weight + i, j, count), count);)
}

typedef struct {
    float *x;
    const float *delta; /* added to x first; 0: nothing is */
    i64 rows, n, x_step, delta_step;
    const float *weight;
    float eps, *y;
    i64 y_step;
    float factor; /* on delta */
} Norm;

static void norm_piece(const void *about, i64 piece)
{
    const Norm *job = about;
    i64 n = job->n, end = least((piece + 1) * rows_of_piece(n), job->rows);
    for (i64 r = piece * rows_of_piece(n); r < end; r++) {
        float *x = job->x + r * job->x_step;
        const float *delta = job->delta + r * job->delta_step;
        if (job->delta)
            BY_REGISTER(n, vf v = multiply_add(splat(job->factor), get(delta + i, j, count), get(x + i, j, count));
                        put(x + i, j, v, count);)
        norm_row(x, job->weight, n, job->eps, job->y + r * job->y_step);
    }
}

/* x [rows, n] with x_step floats from row to row -> y [rows, n], likewise, may be x; eps: the bits of a double */
i64 rms_norm(float *x, i64 rows, i64 n, i64 x_step, const float *weight, i64 eps, float *y, i64 y_step)
{
    Norm job = {x, 0, rows, n, x_step, 0, weight, as_float(eps), y, y_step, 0};
    pool_run(norm_piece, &job, pieces_of(rows, n));
    return 0;
}

/* the same of x + factor * delta, which stays in x; factor: the bits of a double */
i64 add_rms_norm(float *x, const float *delta, i64 rows, i64 n, i64 x_step, i64 delta_step, const float *weight,
                 i64 eps, i64 factor, float *y)
{
    Norm job = {x, delta, rows, n, x_step, delta_step, weight, as_float(eps), y, n, as_float(factor)};
    pool_run(norm_piece, &job, pieces_of(rows, n));
    return 0;
}

typedef struct {
    float *x;
    i64 rows, n, x_step;
    const float *gate;
    i64 gate_step, groups;
    const float *weight;
    float eps;
} GatedNorm;

static void gated_norm_piece(const void *about, i64 piece)
{
    const GatedNorm *job = about;
    i64 n = job->n, width = n / job->groups, end = least((piece + 1) * rows_of_piece(n), job->rows);
    for (i64 r = piece * rows_of_piece(n); r < end; r++) {
        float *x = job->x + r * job->x_step;
        const float *gate = job->gate + r * job->gate_step;
        BY_REGISTER(n, vf z = get(gate + i, j, count);
                    put(x + i, j, get(x + i, j, count) * (z / (1.0f + exp_vf(-z))), count);)
        for (i64 at = 0; at < n; at += width) norm_row(x + at, job->weight + at, width, job->eps, x + at);
    }
}

/* x [rows, n] = the norm of x * silu(gate) over each of `groups` equal parts of a row, times weight; eps: the bits of a
   double */
i64 gated_rms_norm(float *x, i64 rows, i64 n, i64 x_step, const float *gate, i64 gate_step, i64 groups,
                   const float *weight, i64 eps)
{
    GatedNorm job = {x, rows, n, x_step, gate, gate_step, groups, weight, as_float(eps)};
    pool_run(gated_norm_piece, &job, pieces_of(rows, n));
    return 0;
}

/* Returns a * b + c. Which of two products is fused is said, since compilers choose differently. */
INLINE float fused(float a, float b, float c)
{
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* Rotates adjacent pairs by cos + i sin. */
static void rotate(const float *x, i64 pairs, const float *turns, float *y)
{
    for (i64 i = 0; i < pairs; i++) {
        float even = x[2 * i], odd = x[2 * i + 1], cosine = turns[2 * i], sine = turns[2 * i + 1];
        y[2 * i] = fused(even, cosine, -(odd * sine));
        y[2 * i + 1] = fused(odd, cosine, even * sine);
    }
}

typedef struct { /* rope_facts in rows.py */
    i64 heads, kv_heads, width, rotated, norm_last; /* the first `rotated` elements of a head are rotated */
} RopeShape;
typedef struct {
    RopeShape shape;
    CachedForm form;
    float *qkv;
    i64 rows, step;
    const float *norm; /* [heads + kv_heads, width], or 0 */
    float eps;
    const float *turns;
    const i64 *slots;
    float *cache;
} Rope;

static void rope_piece(const void *about, i64 piece)
{
    const Rope *job = about;
    RopeShape a = job->shape;
    i64 d = a.width, kv = 2 * a.kv_heads * d, some = rows_of_piece(a.heads * d + kv);
    for (i64 t = piece * some; t < least((piece + 1) * some, job->rows); t++) {
        float *row = job->qkv + t * job->step;
        for (i64 h = 0; h < a.heads + a.kv_heads; h++) {
            float *head = row + h * d;
            if (job->norm && !a.norm_last) norm_row(head, job->norm + h * d, d, job->eps, head);
            rotate(head, a.rotated / 2, job->turns + t * a.rotated, head);
            if (job->norm && a.norm_last) norm_row(head, job->norm + h * d, d, job->eps, head);
        }
        i64 slot = job->slots[t];
        if (slot < 0) continue;
        if (job->form.kind == FLOAT32) memcpy(job->cache + slot * kv, row + a.heads * d, kv * 4);
        else
            for (i64 h = 0; h < 2 * a.kv_heads; h++)
                quantise_cached(row + (a.heads + h) * d, d, job->form.kind,
                                (char *)job->cache + slot * job->form.slot_step + h * d,
                                job->form.scales + slot * job->form.scale_step + h);
    }
}

/* qkv [rows, (heads + 2 kv_heads) * width]: norms and rotates queries and keys in place; keys and values go to the
   cache's row of each slot, [2 * kv_heads, width]; slot -1: nothing. turns: [rows, rotated / 2] of (cos, sin);
   form: of the cache */
i64 rope_write(const RopeShape *shape, float *qkv, i64 rows, i64 step, const float *norm, i64 eps, const float *turns,
               const i64 *slots, float *cache, const CachedForm *form)
{
    Rope job = {*shape, *form, qkv, rows, step, norm, as_float(eps), turns, slots, cache};
    pool_run(rope_piece, &job, pieces_of(rows, (shape->heads + 2 * shape->kv_heads) * shape->width));
    return 0;
}

typedef struct {
    i64 heads, head_width, latent, rotated; /* a query ends with `rotated` elements, so does a row after its latent */
} MlaShape;
typedef struct {
    const MlaShape *shape;
    float *q;
    i64 q_step;
    const float *row;
    i64 row_step, rows;
    const float *norm; /* [latent] */
    float eps;
    const float *turns;
    const i64 *slots;
    float *cache;
    CachedForm form;
} MlaRope;

static void mla_rope_piece(const void *about, i64 piece)
{
    const MlaRope *job = about;
    MlaShape a = *job->shape;
    i64 width = a.latent + a.rotated, some = rows_of_piece(a.heads * a.rotated + width);
    for (i64 t = piece * some; t < least((piece + 1) * some, job->rows); t++) {
        const float *turns = job->turns + t * a.rotated;
        for (i64 h = 1; h <= a.heads; h++) {
            float *tail = job->q + t * job->q_step + h * a.head_width - a.rotated;
            rotate(tail, a.rotated / 2, turns, tail);
        }
        if (job->slots[t] < 0) continue;
        const float *row = job->row + t * job->row_step;
        i64 slot = job->slots[t];
        if (job->form.kind == FLOAT32) {
            float *to = job->cache + slot * width;
            norm_row(row, job->norm, a.latent, job->eps, to);
            rotate(row + a.latent, a.rotated / 2, turns, to + a.latent);
            continue;
        }
        float made[width];
        char *to = (char *)job->cache + slot * job->form.slot_step;
        float *scales = job->form.scales + slot * job->form.scale_step;
        norm_row(row, job->norm, a.latent, job->eps, made);
        rotate(row + a.latent, a.rotated / 2, turns, made + a.latent);
        quantise_cached(made, a.latent, job->form.kind, to, scales);
        if (a.rotated) quantise_cached(made + a.latent, a.rotated, job->form.kind, to + a.latent, scales + 1);
    }
}

/* q [rows, heads, head_width]: rotates the tail of each head in place; row [rows, latent + rotated]: goes to the
   cache's row of each slot, its latent normed, its tail rotated; slot -1: nothing; form: of the cache */
i64 mla_rope_write(const MlaShape *shape, float *q, i64 q_step, const float *row, i64 row_step, i64 rows,
                   const float *norm, i64 eps, const float *turns, const i64 *slots, float *cache,
                   const CachedForm *form)
{
    MlaRope job = {shape, q, q_step, row, row_step, rows, norm, as_float(eps), turns, slots, cache, *form};
    pool_run(mla_rope_piece, &job, pieces_of(rows, shape->heads * shape->rotated + shape->latent + shape->rotated));
    return 0;
}

typedef struct {
    const float *rows;
    i64 width;
    const i64 *index;
    i64 tokens, topk;
    const float *weights;
    float *out;
} Sum;

static void sum_piece(const void *about, i64 piece)
{
    const Sum *job = about;
    i64 n = job->width, some = rows_of_piece(n * job->topk);
    for (i64 t = piece * some; t < least((piece + 1) * some, job->tokens); t++) {
        const i64 *index = job->index + t * job->topk;
        const float *weights = job->weights + t * job->topk;
        float *out = job->out + t * n;
        i64 i = 0;
        for (; i + 64 <= n; i += 64) {
            vf sum[64 / VL] = {};
            for (i64 k = 0; k < job->topk; k++)
                if (index[k] >= 0) {
                    const float *row = job->rows + index[k] * n + i;
                    UNROLL for (int j = 0; j < 64 / VL; j++)
                        sum[j] = multiply_add(splat(weights[k]), *(const vf *)(row + VL * j), sum[j]);
                }
            memcpy(out + i, sum, sizeof sum);
        }
        for (; i < n; i += 16) {
            vf sum[SPAN] = {};
            for (i64 k = 0; k < job->topk; k++)
                if (index[k] >= 0)
                    UNROLL for (int j = 0; j < SPAN; j++)
                        sum[j] = multiply_add(splat(weights[k]), get(job->rows + index[k] * n + i, j, n - i), sum[j]);
            UNROLL for (int j = 0; j < SPAN; j++) put(out + i, j, sum[j], n - i);
        }
    }
}

/* out[t] = the sum over k, in order, of weights[t, k] * rows[index[t, k]]; index -1: nothing, its weight is not read */
i64 weighted_sum(const float *rows, i64 width, const i64 *index, i64 tokens, i64 topk, const float *weights, float *out)
{
    Sum job = {rows, width, index, tokens, topk, weights, out};
    pool_run(sum_piece, &job, pieces_of(tokens, width * topk));
    return 0;
}

typedef struct {
    const float *x;
    i64 x_step, width, tokens, topk;
    const i64 *index;
    float *rows;
} Pack;

static void pack_piece(const void *about, i64 piece)
{
    const Pack *job = about;
    i64 some = rows_of_piece(job->width * job->topk);
    for (i64 t = piece * some; t < least((piece + 1) * some, job->tokens); t++)
        for (i64 k = 0; k < job->topk; k++) {
            i64 at = job->index[t * job->topk + k];
            if (at >= 0) memcpy(job->rows + at * job->width, job->x + t * job->x_step, job->width * 4);
        }
}

/* One row of x for each id, by slot, then by token and k: writes rows, counts [slots] and index [tokens, topk], the row
   that each id became (-1 for id -1). Returns the number of rows; -1, and nothing written, where an id is no slot. */
i64 pack_rows(const float *x, i64 x_step, i64 width, const i64 *ids, i64 tokens, i64 topk, i64 slots, float *rows,
              i64 *counts, i64 *index)
{
    for (i64 i = 0; i < tokens * topk; i++)
        if (ids[i] < -1 || ids[i] >= slots) return -1;
    memset(counts, 0, slots * 8);
    for (i64 i = 0; i < tokens * topk; i++)
        if (ids[i] >= 0) counts[ids[i]]++;
    i64 total = 0;
    for (i64 s = 0; s < slots; s++) { /* counts become starts, then ends, then counts again */
        i64 count = counts[s];
        counts[s] = total, total += count;
    }
    for (i64 i = 0; i < tokens * topk; i++) index[i] = ids[i] < 0 ? -1 : counts[ids[i]]++;
    for (i64 s = slots - 1; s > 0; s--) counts[s] -= counts[s - 1];
    Pack job = {x, x_step, width, tokens, topk, index, rows};
    pool_run(pack_piece, &job, pieces_of(tokens, width * topk));
    return total;
}
