/* Attention over a window of tokens and entries made of groups of tokens. Contract: kernels/compressed_attention.py. What a
   token computes depends on its own row and on the cached rows that it sees, so chunks, neighbours and threads change no
   bit: a group's entry is made when its last token comes, of the rows that its tokens have left in the cache. */
#include "pool.h"

enum { MOST_TOGETHER = 512 }; /* tokens of a group, as in operations.py */

typedef struct { /* as operations.py fills it */
    i64 heads, width, rotated, window, every, parts, index_heads, index_width, topk;
    const float *norm, *entry_norm, *entry_bias, *index_norm, *index_bias, *sinks;
    const float *turns; /* of each position, [rotated / 2] of (cos, sin) */
    double eps, scale;
} Compressed;

typedef struct {
    const Attend *step;
    const Compressed *c;
    float *q; /* [T, heads, width], without gaps between tokens */
    float *rows;
    i64 row_step, row_width; /* of `rows`, and of the cache */
    float *index_q;
    const i64 *slots;
    float *cache;
    const float *weights; /* [T, index heads] */
    i64 weight_step;
    float *out;
    _Atomic i64 *failed;
} CompressedJob;

INLINE i64 index_at(const Compressed *c) { return c->width * (1 + 2 * c->parts); }

INLINE float *cached_row(const CompressedJob *job, i64 seq, i64 position)
{
    const Attend *a = job->step;
    const i32 *table = a->block_tables + seq * a->table_step;
    return job->cache + (table[position / a->block_size] * a->block_size + position % a->block_size) * job->row_width;
}

static void turn_tail(const Compressed *c, float *head, i64 width, i64 position)
{
    rotate(head + width - c->rotated, c->rotated / 2, c->turns + position * c->rotated, head + width - c->rotated);
}

static void turn_tail_back(const Compressed *c, float *head, i64 position)
{
    float *x = head + c->width - c->rotated;
    const float *turns = c->turns + position * c->rotated;
    for (i64 i = 0; i < c->rotated; i += 2) {
        float even = x[i], odd = x[i + 1], cosine = turns[i], sine = turns[i + 1];
        x[i] = fused(even, cosine, odd * sine);
        x[i + 1] = fused(odd, cosine, -(even * sine));
    }
}

static void compressed_row_piece(const void *about, i64 token)
{
    const CompressedJob *job = about;
    const Compressed *c = job->c;
    i64 position = job->step->positions[token];
    float *row = job->rows + token * job->row_step;
    for (i64 h = 0; h < c->heads; h++) {
        float *head = job->q + (token * c->heads + h) * c->width, by = inverse_rms(head, c->width, (float)c->eps);
        BY_REGISTER(c->width, put(head + i, j, get(head + i, j, count) * by, count);)
        turn_tail(c, head, c->width, position);
    }
    for (i64 h = 0; h < c->index_heads; h++)
        turn_tail(c, job->index_q + (token * c->index_heads + h) * c->index_width, c->index_width, position);
    norm_row(row, c->norm, c->width, (float)c->eps, row);
    turn_tail(c, row, c->width, position);
    if (job->slots[token] >= 0) memcpy(job->cache + job->slots[token] * job->row_width, row, job->row_width * 4);
}

/* The entry of n rows, in the last of them: what each row gives at `at`, weighed by a softmax over the rows of what lies
   `parts` widths behind it. The last `every` rows give their last part, those before them their first. */
static void make_entry(const Compressed *c, float *const *row, i64 n, i64 at, i64 width, i64 parts, const float *bias,
                       const float *norm, i64 position)
{
    float *out = row[n - 1] + at + (parts - 1) * width;
    for (i64 d = 0; d < width; d += 16)
        UNROLL for (int j = 0; j < SPAN; j++) {
            i64 count = least(16, width - d);
            vf most = splat(-INFINITY), total = {}, sum = {};
            for (int weighs = 0; weighs < 2; weighs++)
                for (i64 r = 0; r < n; r++) {
                    i64 from = (r < n - c->every ? 0 : (parts - 1) * width) + d;
                    const float *value = row[r] + at + from;
                    vf gate = get(value + parts * width, j, count);
                    gate += get(bias + r % c->every * parts * width + from, j, count);
                    if (!weighs) most = pick(gate > most, gate, most);
                    else {
                        gate = exp_vf(gate - most);
                        total += gate;
                        sum = multiply_add(gate, get(value, j, count), sum);
                    }
                }
            put(out + d, j, sum / total, count);
        }
    norm_row(out, norm, width, (float)c->eps, out);
    turn_tail(c, out, width, position);
}

static void compressed_entry_piece(const void *about, i64 token)
{
    const CompressedJob *job = about;
    const Compressed *c = job->c;
    i64 position = job->step->positions[token], first = position + 1 - c->every, before = c->parts > 1 ? c->every : 0;
    if ((position + 1) % c->every || job->slots[token] < 0) return;
    float *row[2 * MOST_TOGETHER];
    i64 seq = sequence_of_token(job->step, token), n = first ? before + c->every : c->every;
    for (i64 r = 0; r < n; r++) row[r] = cached_row(job, seq, position + 1 - n + r);
    make_entry(c, row, n, c->width, c->width, c->parts, c->entry_bias, c->entry_norm, first);
    if (c->index_heads) make_entry(c, row, n, index_at(c), c->index_width, 2, c->index_bias, c->index_norm, first);
}

static void compressed_attend_piece(const void *about, i64 token)
{
    const CompressedJob *job = about;
    const Compressed *c = job->c;
    i64 position = job->step->positions[token], seq = sequence_of_token(job->step, token);
    i64 near = least(position + 1, c->window), entries = c->every ? (position + 1) / c->every : 0, kept = entries;
    if (c->index_heads && entries > c->topk) kept = c->topk;
    i64 n = near + kept, bytes = (entries * 4 + kept * 8 + n * 12 + 128 + 63) / 64 * 64;
    i64 *chosen = indexed_room_of(bytes);
    if (!chosen) {
        atomic_store(job->failed, 1);
        return;
    }
    const float **row = (const float **)(chosen + kept);
    float *p = (float *)(row + n), *score = p + (n + 15) / 16 * 16;
    if (kept < entries) {
        const float *query = job->index_q + token * c->index_heads * c->index_width;
        const float *weight = job->weights + token * job->weight_step;
        for (i64 e = 0; e < entries; e++) {
            const float *key = cached_row(job, seq, (e + 1) * c->every - 1) + index_at(c) + c->index_width;
            score[e] = 0;
            for (i64 h = 0; h < c->index_heads; h++) {
                float product = dot(query + h * c->index_width, key, c->index_width);
                if (!(product <= 0)) score[e] = fused(weight[h], product, score[e]);
            }
        }
        choose_keys(score, entries, kept, chosen);
    } else
        for (i64 e = 0; e < entries; e++) chosen[e] = e;
    for (i64 i = 0; i < near; i++) row[i] = cached_row(job, seq, position + 1 - near + i);
    for (i64 e = 0; e < kept; e++) row[near + e] = cached_row(job, seq, (chosen[e] + 1) * c->every - 1) + c->width * c->parts;
    for (i64 h = 0; h < c->heads; h++) {
        i64 at = (token * c->heads + h) * c->width;
        attend_rows(job->q + at, c->width, (float)c->scale, row, n, c->width, c->sinks[h], p, job->out + at);
        turn_tail_back(c, job->out + at, position);
    }
}

/* q [T, heads, width], rows [T, row_width] with row_step, index_q [T, index heads, index width]: norms and rotates them in
   place, writes rows to their slots of the cache [slots, row_width], and makes the entries of groups that they end */
i64 write_compressed(const Attend *step, const Compressed *facts, float *q, float *rows, i64 row_step, i64 row_width,
                     float *index_q, const i64 *slots, float *cache)
{
    CompressedJob job = {step, facts, q, rows, row_step, row_width, index_q, slots, cache};
    pool_run(compressed_row_piece, &job, step->num_rows);
    if (facts->every) pool_run(compressed_entry_piece, &job, step->num_rows);
    return 0;
}

/* What they attend, rotated back, to out [T, heads, width]. weights: [T, index heads] with weight_step. Returns -1 where
   there is no memory to work in. */
i64 attend_compressed(const Attend *step, const Compressed *facts, float *q, i64 row_width, float *index_q,
                      const float *weights, i64 weight_step, float *cache, float *out)
{
    _Atomic i64 failed = 0;
    CompressedJob job = {step, facts, q, 0, 0, row_width, index_q, 0, cache, weights, weight_step, out, &failed};
    pool_run(compressed_attend_piece, &job, step->num_rows);
    return failed ? -1 : 0;
}
