/* Draws one token for each row of logits: the largest sum of logit / temperature and Gumbel noise among the tokens that
   top_k, top_p and min_p leave. One piece of work is one row, which fits into the cache. */
#include "pool.h"
/* Off for all functions down to the end of this file: a function inlined into another one takes its options. */
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif
#include "cut.h"
#include "gumbel.h"
#include "logit_changes.h"
#include <float.h>

enum { STRETCH = 64 * VL }; /* tokens whose weights are added up as floats */
enum { NOT_FINITE = -1, NONE_LEFT = -2 }; /* instead of a token, as in kernels/sampling.py */
#define OFTEN 0.75            /* from this top_p on, a token drawn from the whole row is kept often enough to try */

typedef struct { /* as SAMPLING_ROW of kernels/sampling.py */
    double temperature, top_p, min_p;
    i64 top_k, seed, output_index;
} Sampling;

typedef struct {
    float *logits;
    i64 stride, vocab;
    const Sampling *rows;
    const LogitChanges *changes; /* NULL = no row has any */
    i64 *tokens;
} SamplingJob;

/* The id of the `count`-th logit, from 1, that equals this one; the row's last id where there are fewer. */
static i64 id_of_equal(const LogitRow *row, float logit, i64 count)
{
    for (i64 id = 0; id < row->vocab; id += VL) {
        vi equal = *(const vf *)logits_at(row, id) == logit;
        if (!any(equal)) continue;
        for (int lane = 0; lane < VL; lane++)
            if (equal[lane] && !--count) return id + lane;
    }
    return row->vocab - 1;
}

/* Which tokens can still win, by a test that errs on the safe side. With uniform u, noise is at most -ln(1 - u), so a
   token needs (1 - u) <= exp(s - best). exp is bounded from above by its chord between powers of two: the bits of a
   float are a line in its logarithm. `slope` and `offset` give these bits, times 2^27, since 27 bits of 1 - u are
   compared. */
typedef struct {
    float slope, offset;
} Hope;

static Hope hope_above(const LogitRow *row, double best)
{
    const double bits = 8388608.0 / 0.69314718055994530942; /* of a float for a factor of e */
    double slope = row->inverse * bits * (1 - 1e-6);
    return (Hope){slope < 1e37 ? (float)slope : 1e37f, (float)((127 + 27) * 8388608.0 + 4096 - best * bits)};
}

INLINE vi can_win(const LogitRow *row, Hope hope, vf logits, vu word)
{
    vf distance = larger(logits - row->top, (vf){} - FLT_MAX);
    vf bound = (vf)__builtin_convertvector(larger(distance * hope.slope + hope.offset, (vf){}), vi);
    return __builtin_convertvector((vi)(~word >> 5), vf) <= bound;
}

/* Returns the token with the largest sum; of equal sums the lowest id. */
static i64 draw(const LogitRow *row, Cut cut, const Philox *philox)
{
    float least = logit_of(cut.key);
    i64 last_tie = cut.ties < cut.equal ? id_of_equal(row, least, cut.ties) : row->vocab - 1, token = -1;
    double best = -3.63; /* less than the least noise, which the likeliest token's sum has at least */
    Hope hope = hope_above(row, best);
    for (i64 id = 0; id < row->vocab; id += BLOCK) {
        vf logits[BLOCK / VL];
        vi remain[BLOCK / VL], some = {};
        vu words[2][BLOCK / VL];
        UNROLL
        for (int i = 0; i < BLOCK / VL; i++) {
            logits[i] = *(const vf *)logits_at(row, id + i * VL);
            some |= remain[i] = logits[i] >= least;
        }
        if (!any(some)) continue;
        philox_block(philox, id, words);
        some = (vi){};
        UNROLL
        for (int i = 0; i < BLOCK / VL; i++) some |= remain[i] &= can_win(row, hope, logits[i], words[0][i]);
        if (!any(some)) continue;
        for (int i = 0; i < BLOCK; i++) {
            float logit = ((float *)logits)[i];
            if (!((i32 *)remain)[i] || (logit == least && id + i > last_tie)) continue;
            double sum = scaled(row, logit) + gumbel_of(((uint32_t *)words[0])[i], ((uint32_t *)words[1])[i]);
            if (sum <= best) continue;
            best = sum, token = id + i;
            hope = hope_above(row, best);
        }
    }
    return token;
}

/* Whether top_p certainly keeps a token that was drawn from the whole row; 0 where it does not, or only the exact cut
   can tell. Weights are floats here. Their sums are off by less than 1e-4 of the total: 2e-5 by the roundings of
   distances, weights and sums, and half a unit of 2^-40 for each token by the rounding of the exact weights. */
static int surely_in_top_p(const LogitRow *row, i64 token, double top_p)
{
    float logit = row->logits[token], inverse = (float)row->inverse;
    if (row->inverse < 1e-30 || row->inverse > 1e30 || row->vocab > 1 << 24) return 0;
    float next = logit_of(keys_of((vf){} + logit)[0] + 1); /* the smallest float above it */
    i64 first = token / VL * VL;
    double total = 0, likelier = 0;
    for (i64 start = 0; start < row->vocab; start += STRETCH) {
        vf sums[2] = {};
        for (i64 id = start, end = least(start + STRETCH, row->vocab); id < end; id += VL) {
            vf logits = *(const vf *)logits_at(row, id);
            vf weights = exp_vf((logits - row->top) * inverse);
            sums[0] += weights;
            sums[1] += (vf)((vi)weights & (logits >= (id < first ? logit : next)));
        }
        for (int lane = 0; lane < VL; lane++) total += sums[0][lane], likelier += sums[1][lane];
    }
    double own = exp_vf((vf){} + (logit - row->top) * inverse)[0];
    for (i64 id = first; id < token; id++) likelier += row->logits[id] == logit ? own : 0; /* lower ids come first */
    return likelier < (top_p - 1e-4) * total;
}

static i64 token_of(const SamplingJob *job, i64 index)
{
    const Sampling *sampling = &job->rows[index];
    float *logits = job->logits + index * job->stride;
    LogitRow row = row_of(logits, job->vocab);
    row.top = finite_top(&row);
    if (row.top == -__builtin_inff()) return NOT_FINITE;
    if (job->changes && has_changes(&job->changes[index])) {
        change_logits(logits, job->vocab, &job->changes[index]);
        row = row_of(logits, job->vocab);
        row.top = finite_top(&row);
        if (row.top == -__builtin_inff()) return NONE_LEFT;
    }
    if (sampling->temperature == 0) return id_of_equal(&row, row.top, 1);
    double inverse = 1.0 / sampling->temperature, scale = inverse * (BINS / 29.0); /* exp(-29) weighs nothing */
    row.inverse = inverse < DBL_MAX ? inverse : DBL_MAX;
    row.scale = scale < 1e-30 ? 1e-30f : scale > 1e30 ? 1e30f : (float)scale;
    Philox philox = philox_of(sampling->seed, sampling->output_index);
    if (sampling->top_p < 1.0 && sampling->top_p >= OFTEN && (sampling->top_k <= 0 || sampling->top_k >= row.vocab)) {
        /* A token that wins among all wins among those that top_p keeps, if it is one of them: as a rule it is, and
           that takes two sums to see where the cut takes a histogram. */
        i64 token = draw(&row, find_cut(&row, -1, 1.0, sampling->min_p), &philox);
        if (surely_in_top_p(&row, token, sampling->top_p)) return token;
    }
    return draw(&row, find_cut(&row, sampling->top_k, sampling->top_p, sampling->min_p), &philox);
}

static void sample_piece(const void *job, i64 row)
{
    const SamplingJob *sampling = job;
    sampling->tokens[row] = token_of(sampling, row);
}

/* Writes the token of each row, or why there is none. Changes are made in place. changes: [num_rows] LogitChanges, or 0 where no row has any */
i64 sample_rows(i64 logits, i64 stride, i64 vocab, i64 num_rows, i64 rows, i64 changes, i64 tokens)
{
    SamplingJob job = {(float *)logits, stride, vocab, (const Sampling *)rows, (const LogitChanges *)changes,
                       (i64 *)tokens};
    pool_run(sample_piece, &job, num_rows);
    return 0;
}

#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC pop_options
#endif
