/* Log probabilities of tokens, by row of logits: kernels/sampling.py says which. One piece of work is one row. */
#include "pool.h"
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif
#include "cut.h"

typedef struct {
    const float *logits;
    i64 stride, vocab;
    const i64 *id_starts, *ids, *top_starts;
    i64 *ranks;
    float *logprobs;
    i64 *top_ids;
    float *top_logprobs;
} LogprobJob;

/* exp(logit - top) over the row, in units of 2^-40: an integer, so its order does not matter. */
static i64 total_weight(const LogitRow *row)
{
    vq totals[2] = {};
    for (i64 id = 0; id < row->vocab; id += VL) {
        const float *logits = logits_at(row, id);
        for (int half = 0; half < 2; half++) {
            vd s = __builtin_convertvector(*(const vf_half *)(logits + half * LANES), vd);
            totals[half] += weights_of(s - (double)row->top);
        }
    }
    i64 total = 0;
    for (int lane = 0; lane < LANES; lane++) total += (i64)(totals[0][lane] + totals[1][lane]);
    return total;
}

/* 1 for the likeliest token; of equal ones the lowest id comes first. */
static i64 rank_of(const LogitRow *row, i64 token)
{
    float own = row->logits[token];
    i64 rank = 1, first = token / VL * VL;
    vi before = {};
    for (i64 id = 0; id < row->vocab; id += VL) {
        vf logits = *(const vf *)logits_at(row, id);
        if (id == first) continue;
        before -= id < first ? logits >= own : logits > own;
    }
    for (int lane = 0; lane < VL; lane++) rank += before[lane];
    const float *logits = logits_at(row, first);
    for (int lane = 0; lane < VL; lane++)
        rank += logits[lane] > own || (logits[lane] == own && first + lane < token);
    return rank;
}

/* Writes the ids of the `count` largest logits, likeliest first, equal ones by id. */
static void find_likeliest(const LogitRow *row, i64 count, i64 *ids)
{
    i64 found = 0;
    float least = -__builtin_inff();
    for (i64 id = 0; id < row->vocab; id += VL) {
        const float *logits = logits_at(row, id);
        if (found == count && !any(*(const vf *)logits > least)) continue;
        for (i64 lane = 0; lane < VL && id + lane < row->vocab; lane++) {
            float logit = logits[lane];
            if (found == count && !(logit > least)) continue;
            i64 at = found < count ? found++ : count - 1;
            for (; at && row->logits[ids[at - 1]] < logit; at--) ids[at] = ids[at - 1];
            ids[at] = id + lane;
            least = row->logits[ids[found - 1]];
        }
    }
}

static void score_piece(const void *given, i64 index)
{
    const LogprobJob *job = given;
    LogitRow row = row_of(job->logits + index * job->stride, job->vocab);
    row.top = finite_top(&row);
    job->ranks[index] = 0;
    if (row.top == -__builtin_inff()) return;
    double top = row.top, log_total = log_of((double)total_weight(&row) * 0x1p-40);
    i64 first = job->id_starts[index], end = job->id_starts[index + 1];
    for (i64 i = first; i < end; i++)
        job->logprobs[i] = (float)(((double)row.logits[job->ids[i]] - top) - log_total);
    job->ranks[index] = rank_of(&row, job->ids[first]);
    i64 begin = job->top_starts[index], count = job->top_starts[index + 1] - begin;
    if (!count) return;
    find_likeliest(&row, count, job->top_ids + begin);
    for (i64 i = begin; i < begin + count; i++)
        job->top_logprobs[i] = (float)(((double)row.logits[job->top_ids[i]] - top) - log_total);
}

/* Fills what RowLogprobs of kernels/sampling.py holds. */
i64 row_logprobs(i64 logits, i64 stride, i64 vocab, i64 num_rows, i64 id_starts, i64 ids, i64 top_starts, i64 ranks,
                 i64 logprobs, i64 top_ids, i64 top_logprobs)
{
    LogprobJob job = {(const float *)logits, stride, vocab, (const i64 *)id_starts, (const i64 *)ids,
                      (const i64 *)top_starts, (i64 *)ranks, (float *)logprobs, (i64 *)top_ids,
                      (float *)top_logprobs};
    pool_run(score_piece, &job, num_rows);
    return 0;
}

#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC pop_options
#endif
