/* Sparse attention of DeepSeek-V3.2. Contract: kernels/indexed_attention.py. A row is one token: it scores the keys that it
   sees, finds the topk-th largest score by its bits, and attends the keys above it, and the first of those that equal it.
   Everything that a row computes depends on that row alone. */
#include <stdlib.h>
#include "pool.h"

typedef struct {
    i64 heads, width, topk;
} Indexer;
typedef struct {
    const Attend *step;
    const float *q;
    i64 q_step;
    const float *cache;
    float *out;
    const float *index_q;
    i64 index_step;
    const float *weights; /* [T, index heads] */
    i64 weight_step;
    const float *index_cache; /* [slots, index width] */
    const Indexer *indexer;
    _Atomic i64 *failed;
} Indexed;

typedef struct {
    float *q;
    i64 rows, step, heads, width, rotated;
    float *k;
    i64 k_step;
    const float *turns;
    const i64 *slots;
    float *cache;
} IndexWrite;

static void index_write_piece(const void *about, i64 piece)
{
    const IndexWrite *job = about;
    i64 n = job->width, some = rows_of_piece((job->heads + 1) * n);
    for (i64 t = piece * some; t < least((piece + 1) * some, job->rows); t++) {
        const float *turns = job->turns + t * job->rotated;
        float *key = job->k + t * job->k_step;
        for (i64 h = 0; h < job->heads; h++) {
            float *head = job->q + t * job->step + h * n;
            rotate(head, job->rotated / 2, turns, head);
        }
        rotate(key, job->rotated / 2, turns, key);
        if (job->slots[t] >= 0) memcpy(job->cache + job->slots[t] * n, key, n * 4);
    }
}

/* q [rows, heads, width], k [rows, width]: rotates their first `rotated` elements in place; keys go to the cache's row of
   each slot; slot -1: nothing. turns: [rows, rotated / 2] of (cos, sin) */
i64 index_write(float *q, i64 rows, i64 step, i64 heads, i64 width, i64 rotated, float *k, i64 k_step,
                const float *turns, const i64 *slots, float *cache)
{
    IndexWrite job = {q, rows, step, heads, width, rotated, k, k_step, turns, slots, cache};
    pool_run(index_write_piece, &job, pieces_of(rows, (heads + 1) * width));
    return 0;
}

INLINE float dot(const float *x, const float *y, i64 n)
{
    vf sum[64 / VL] = {};
    i64 whole = n / 64 * 64;
    for (i64 i = 0; i < whole; i += 64)
        UNROLL for (int j = 0; j < 64 / VL; j++)
            sum[j] = multiply_add(*(const vf *)(x + i + VL * j), *(const vf *)(y + i + VL * j), sum[j]);
    BY_REGISTER(n - whole, sum[j] = multiply_add(get(x + whole + i, j, count), get(y + whole + i, j, count), sum[j]);)
    return sum64(sum);
}

/* The order of floats as that of integers; -0 as 0, NaN as -inf. */
INLINE uint32_t by_bits(float x)
{
    uint32_t bits;
    x = x == x ? x + 0.0f : -INFINITY;
    memcpy(&bits, &x, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* Writes the `topk` best of n scores, ascending, to chosen. */
static void choose_keys(const float *score, i64 n, i64 topk, i64 *chosen)
{
    uint32_t border = 0, known = 0; /* the first bits of the topk-th largest */
    i64 left = topk;                /* keys to take among those that begin with them */
    for (int shift = 24; shift >= 0; shift -= 8) {
        i64 count[256] = {}, byte = 255;
        for (i64 i = 0; i < n; i++) {
            uint32_t bits = by_bits(score[i]);
            if ((bits & known) == border) count[bits >> shift & 255]++;
        }
        while (count[byte] < left) left -= count[byte--];
        border |= (uint32_t)byte << shift, known |= 255u << shift;
    }
    for (i64 i = 0; i < n; i++) {
        uint32_t bits = by_bits(score[i]);
        if (bits > border || (bits == border && left-- > 0)) *chosen++ = i;
    }
}

/* One query head over the chosen rows, which are keys and, in their first part, values. p: [n], filled up to 16s; sink: a
   score beside theirs, whose weight goes nowhere; -inf: there is none */
static void attend_rows(const float *q, i64 width, float scale, const float *const *row, i64 n, i64 value_width, float sink,
                        float *p, float *out)
{
    vf most = splat(-INFINITY), total[SPAN] = {};
    for (i64 j = 0; j < n; j++) p[j] = dot(q, row[j], width) * scale;
    for (i64 j = n; j % 16; j++) p[j] = -INFINITY;
    for (i64 i = 0; i < n; i += VL) {
        vf x = *(const vf *)(p + i);
        most = pick(x > most, x, most);
    }
    float best = highest(most);
    if (sink > best) best = sink;
    if (sink - best >= -87.0f) total[0][0] = exp_vf(splat(sink - best))[0];
    for (i64 i = 0; i < n; i += 16)
        UNROLL for (int j = 0; j < SPAN; j++) {
            vf x = *(const vf *)(p + i + j * VL) - best;
            x = pick(x < -87.0f, (vf){}, exp_vf(x));
            *(vf *)(p + i + j * VL) = x;
            total[j] += x;
        }
    float by = 1 / sum16(total);
    i64 d = 0;
    for (; d + 64 <= value_width; d += 64) {
        vf sum[64 / VL] = {};
        for (i64 t = 0; t < n; t++)
            UNROLL for (int j = 0; j < 64 / VL; j++)
                sum[j] = multiply_add(splat(p[t]), *(const vf *)(row[t] + d + j * VL), sum[j]);
        UNROLL for (int j = 0; j < 64 / VL; j++) *(vf *)(out + d + j * VL) = sum[j] * by;
    }
    for (; d < value_width; d += 16) {
        vf sum[SPAN] = {};
        for (i64 t = 0; t < n; t++)
            UNROLL for (int j = 0; j < SPAN; j++)
                sum[j] = multiply_add(splat(p[t]), get(row[t] + d, j, value_width - d), sum[j]);
        UNROLL for (int j = 0; j < SPAN; j++) put(out + d, j, sum[j] * by, value_width - d);
    }
}

static _Thread_local struct { /* of a thread, kept for the next piece */
    char *at;
    i64 bytes;
} indexed_room;

/* Returns so many bytes of this thread, a multiple of 64; NULL: there is no memory. */
static void *indexed_room_of(i64 bytes)
{
    if (indexed_room.bytes < bytes) {
        free(indexed_room.at);
        indexed_room.at = aligned_alloc(64, bytes);
        indexed_room.bytes = indexed_room.at ? bytes : 0;
    }
    return indexed_room.at;
}

INLINE i64 sequence_of_token(const Attend *a, i64 token)
{
    i64 seq = 0, end = a->num_seqs;
    while (end - seq > 1) {
        i64 middle = (seq + end) / 2;
        *(a->query_starts[middle] <= token ? &seq : &end) = middle;
    }
    return seq;
}

static void indexed_piece(const void *about, i64 token)
{
    const Indexed *job = about;
    const Attend *a = job->step;
    const Indexer *x = job->indexer;
    i64 seq = sequence_of_token(a, token), seen = a->positions[token] + 1, count = least(seen, x->topk);
    i64 bytes = (seen * 4 + count * 20 + 64 + 63) / 64 * 64 + 128;
    i64 *chosen = indexed_room_of(bytes);
    if (!chosen) {
        atomic_store(job->failed, 1);
        return;
    }
    const float **row = (const float **)(chosen + count);
    float *p = (float *)(row + count), *score = p + (count + 15) / 16 * 16;
    const i32 *table = a->block_tables + seq * a->table_step;
    if (seen > x->topk) {
        const float *query = job->index_q + token * job->index_step, *weight = job->weights + token * job->weight_step;
        for (i64 i = 0; i < seen; i++) {
            const float *key = job->index_cache + (table[i / a->block_size] * a->block_size + i % a->block_size) * x->width;
            score[i] = 0;
            for (i64 h = 0; h < x->heads; h++) {
                float product = dot(query + h * x->width, key, x->width);
                if (!(product <= 0)) score[i] += weight[h] * product;
            }
        }
        choose_keys(score, seen, count, chosen);
    } else
        for (i64 i = 0; i < seen; i++) chosen[i] = i;
    for (i64 j = 0; j < count; j++) {
        i64 i = chosen[j];
        row[j] = job->cache + (table[i / a->block_size] * a->block_size + i % a->block_size) * a->slot_step;
    }
    for (i64 h = 0; h < a->group; h++)
        attend_rows(job->q + token * job->q_step + h * a->width, a->width, (float)a->scale, row, count, a->value_width,
                    -INFINITY, p, job->out + (token * a->group + h) * a->value_width);
}

/* As attend, of the keys that the indexer chooses; one key/value head. index_q: [T, index heads, index width], weights:
   [T, index heads], with steps from token to token. Returns -1 where there is no memory to work in. */
i64 attend_indexed(const Attend *step, const float *q, i64 q_step, const float *cache, float *out, const float *index_q,
                   i64 index_step, const float *weights, i64 weight_step, const float *index_cache,
                   const Indexer *indexer)
{
    _Atomic i64 failed = 0;
    Indexed job = {step, q, q_step, cache, out, index_q, index_step, weights, weight_step, index_cache, indexer, &failed};
    pool_run(indexed_piece, &job, step->num_rows);
    return failed ? -1 : 0;
}
