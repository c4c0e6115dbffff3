/* Rows changed in place. A row's bits depend on that row only. */
#include "pool.h"

typedef struct {
    float *x;
    i64 rows, n, step;
    float number;
    const float *added, *logits;
} Update;

static void scale_piece(const void *about, i64 piece)
{
    const Update *job = about;
    i64 n = job->n, end = least((piece + 1) * rows_of_piece(n), job->rows);
    for (i64 r = piece * rows_of_piece(n); r < end; r++) {
        float *x = job->x + r * job->step;
        for (i64 i = 0; i < n; i += 16) put(x + i, get(x + i, n - i) * job->number, n - i);
    }
}

/* x [rows, n], with `step` floats from row to row, times a factor, the bits of a double */
i64 scale_rows(float *x, i64 rows, i64 n, i64 step, i64 factor)
{
    Update job = {x, rows, n, step, as_float(factor)};
    pool_run(scale_piece, &job, pieces_of(rows, n));
    return 0;
}

typedef struct {
    const float *x;
    i64 rows, n, step;
    const float *factors;
    float *out;
    i64 out_step;
} Products;

static void multiply_piece(const void *about, i64 piece)
{
    const Products *job = about;
    i64 n = job->n, end = least((piece + 1) * rows_of_piece(n), job->rows);
    for (i64 r = piece * rows_of_piece(n); r < end; r++)
        for (i64 i = 0; i < n; i += 16)
            put(job->out + r * job->out_step + i, get(job->x + r * job->step + i, n - i) * job->factors[r], n - i);
}

/* out[r] = factors[r] * x[r], rows of n floats, with steps from row to row; out may be x */
i64 multiply_rows(const float *x, i64 rows, i64 n, i64 step, const float *factors, float *out, i64 out_step)
{
    Products job = {x, rows, n, step, factors, out, out_step};
    pool_run(multiply_piece, &job, pieces_of(rows, n));
    return 0;
}

static void clip_piece(const void *about, i64 piece)
{
    const Update *job = about;
    i64 n = job->n, end = least((piece + 1) * rows_of_piece(n), job->rows);
    v16 most = (v16){} + job->number;
    for (i64 r = piece * rows_of_piece(n); r < end; r++) {
        float *x = job->x + r * job->step;
        for (i64 i = 0; i < n; i += 16) {
            v16 v = get(x + i, n - i);
            v = pick16(v > most, most, v);
            put(x + i, pick16(v < -most, -most, v), n - i);
        }
    }
}

/* x [rows, n] to between -limit and limit, the bits of a double; NaN stays */
i64 clip_rows(float *x, i64 rows, i64 n, i64 step, i64 limit)
{
    Update job = {x, rows, n, step, as_float(limit)};
    pool_run(clip_piece, &job, pieces_of(rows, n));
    return 0;
}

static void gated_piece(const void *about, i64 piece)
{
    const Update *job = about;
    i64 n = job->n, end = least((piece + 1) * rows_of_piece(n), job->rows);
    for (i64 r = piece * rows_of_piece(n); r < end; r++) {
        float *x = job->x + r * n;
        const float *added = job->added + r * n;
        v16 by = 1.0f / (1.0f + exp16((v16){} - job->logits[r]));
        for (i64 i = 0; i < n; i += 16) put(x + i, get(x + i, n - i) + by * get(added + i, n - i), n - i);
    }
}

/* x[r] += sigmoid(logits[r]) * added[r], rows of n floats without gaps */
i64 add_gated_rows(float *x, const float *added, i64 rows, i64 n, const float *logits)
{
    Update job = {x, rows, n, n, 0, added, logits};
    pool_run(gated_piece, &job, pieces_of(rows, n));
    return 0;
}
