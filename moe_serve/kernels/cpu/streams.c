/* A residual of several streams. Contract: kernels/streams.py. A row's bits depend on that row alone. */
#include "pool.h"

enum { MOST_STREAMS = 8 }; /* as in operations.py */

typedef struct { /* as operations.py fills it */
    i64 streams, width, rounds, mixes /* whether there are weights of results and of streams, too */;
    const float *base, *scale;
    double eps, norm_eps;
} Streams;

typedef struct {
    const Streams *s;
    float *x; /* [rows, streams * width] */
    i64 rows;
    float *weights; /* [rows, streams, or (2 + streams) * streams] */
    i64 weights_step;
    float *out; /* [rows, width]: the sum of streams, or what is added to them */
} StreamJob;

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_vf(splat(-x))[0]); }

/* m [n, n]: the softmax of each row, then `rounds` times columns and rows divided by their sums. */
static void balance(const Streams *s, float *m)
{
    i64 n = s->streams;
    float eps = (float)s->eps, total;
    for (i64 i = 0; i < n; i++) {
        float most = m[i * n];
        for (i64 j = 1; j < n; j++) most = m[i * n + j] > most ? m[i * n + j] : most;
        total = 0;
        for (i64 j = 0; j < n; j++) total += m[i * n + j] = exp_vf(splat(m[i * n + j] - most))[0];
        for (i64 j = 0; j < n; j++) m[i * n + j] = m[i * n + j] / total + eps;
    }
    for (i64 round = 0; round < s->rounds; round++) {
        for (i64 i = 0; round && i < n; i++) {
            total = 0;
            for (i64 j = 0; j < n; j++) total += m[i * n + j];
            for (i64 j = 0; j < n; j++) m[i * n + j] /= total + eps;
        }
        for (i64 j = 0; j < n; j++) {
            total = 0;
            for (i64 i = 0; i < n; i++) total += m[i * n + j];
            for (i64 i = 0; i < n; i++) m[i * n + j] /= total + eps;
        }
    }
}

static void weigh_streams(const Streams *s, const float *x, float *weights)
{
    i64 n = s->streams;
    float by = inverse_rms(x, n * s->width, (float)s->norm_eps);
    for (i64 i = 0; i < (s->mixes ? (2 + n) * n : n); i++)
        weights[i] = fused(weights[i] * by, s->scale[i < 2 * n ? i / n : 2], s->base[i]);
    for (i64 i = 0; i < n; i++) weights[i] = sigmoid(weights[i]) + (float)s->eps;
    if (!s->mixes) return;
    for (i64 i = n; i < 2 * n; i++) weights[i] = 2 * sigmoid(weights[i]);
    balance(s, weights + 2 * n);
}

static void sum_streams_piece(const void *about, i64 piece)
{
    const StreamJob *job = about;
    const Streams *s = job->s;
    i64 n = s->streams, width = s->width, some = rows_of_piece(n * width);
    for (i64 r = piece * some; r < least((piece + 1) * some, job->rows); r++) {
        const float *x = job->x + r * n * width;
        float *weights = job->weights + r * job->weights_step, *out = job->out + r * width;
        weigh_streams(s, x, weights);
        BY_REGISTER(width, vf sum = {};
                    for (i64 k = 0; k < n; k++) sum = multiply_add(splat(weights[k]), get(x + k * width + i, j, count), sum);
                    put(out + i, j, sum, count);)
    }
}

/* x [rows, streams * width], weights: products of x -> weights, and out [rows, width], the weighted sum of streams */
i64 sum_streams(const Streams *facts, float *x, i64 rows, float *weights, i64 weights_step, float *out)
{
    StreamJob job = {facts, x, rows, weights, weights_step, out};
    pool_run(sum_streams_piece, &job, pieces_of(rows, facts->streams * facts->width));
    return 0;
}

static void mix_streams_piece(const void *about, i64 piece)
{
    const StreamJob *job = about;
    i64 n = job->s->streams, width = job->s->width, some = rows_of_piece(n * width);
    for (i64 r = piece * some; r < least((piece + 1) * some, job->rows); r++) {
        float *x = job->x + r * n * width;
        const float *delta = job->out + r * width, *post = job->weights + r * job->weights_step + n, *comb = post + n;
        BY_REGISTER(width, vf stream[MOST_STREAMS]; vf added = get(delta + i, j, count);
                    for (i64 k = 0; k < n; k++) stream[k] = get(x + k * width + i, j, count);
                    for (i64 k = 0; k < n; k++) {
                        vf sum = splat(post[k]) * added;
                        for (i64 l = 0; l < n; l++) sum = multiply_add(splat(comb[l * n + k]), stream[l], sum);
                        put(x + k * width + i, j, sum, count);
                    })
    }
}

/* x [rows, streams * width] = the streams mixed, and delta [rows, width] times the weight of each */
i64 mix_streams(const Streams *facts, float *x, i64 rows, float *weights, i64 weights_step, float *delta)
{
    StreamJob job = {facts, x, rows, weights, weights_step, delta};
    pool_run(mix_streams_piece, &job, pieces_of(rows, facts->streams * facts->width));
    return 0;
}
