/* Rows changed in place. A row's bits depend on that row only. */
#include "pool.h"
#include "sequences.h"

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
        BY_REGISTER(n, put(x + i, j, get(x + i, j, count) * job->number, count);)
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
    for (i64 r = piece * rows_of_piece(n); r < end; r++) {
        const float *x = job->x + r * job->step;
        float *out = job->out + r * job->out_step;
        BY_REGISTER(n, put(out + i, j, get(x + i, j, count) * job->factors[r], count);)
    }
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
    vf most = splat(job->number);
    for (i64 r = piece * rows_of_piece(n); r < end; r++) {
        float *x = job->x + r * job->step;
        BY_REGISTER(n, vf v = get(x + i, j, count); v = pick(v > most, most, v);
                    put(x + i, j, pick(v < -most, -most, v), count);)
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
        vf by = 1.0f / (1.0f + exp_vf(splat(-job->logits[r])));
        BY_REGISTER(n, put(x + i, j, multiply_add(by, get(added + i, j, count), get(x + i, j, count)), count);)
    }
}

/* x[r] += sigmoid(logits[r]) * added[r], rows of n floats without gaps */
i64 add_gated_rows(float *x, const float *added, i64 rows, i64 n, const float *logits)
{
    Update job = {x, rows, n, n, 0, added, logits};
    pool_run(gated_piece, &job, pieces_of(rows, n));
    return 0;
}

typedef struct {
    float *x;
    i64 rows, n, step;
    const float *logits;
    i64 logits_step, is_softplus;
} Gates;

static void sigmoid_piece(const void *about, i64 piece)
{
    const Gates *job = about;
    i64 n = job->n, end = least((piece + 1) * rows_of_piece(n), job->rows);
    for (i64 r = piece * rows_of_piece(n); r < end; r++) {
        float *x = job->x + r * job->step;
        const float *logits = job->logits + r * job->logits_step;
        BY_REGISTER(n, put(x + i, j, get(x + i, j, count) / (1.0f + exp_vf(-get(logits + i, j, count))), count);)
    }
}

static void head_gates_piece(const void *about, i64 piece)
{
    const Gates *job = about; /* n: of a head;  step: heads of a row */
    i64 n = job->n, heads = job->step, end = least((piece + 1) * rows_of_piece(heads * n), job->rows);
    for (i64 r = piece * rows_of_piece(heads * n); r < end; r++)
        for (i64 h = 0; h < heads; h++) {
            float *x = job->x + (r * heads + h) * n;
            float logit = job->logits[r * job->logits_step + h];
            vf by;
            if (job->is_softplus) by = splat(softplus(logit));
            else by = 1.0f / (1.0f + exp_vf(splat(-logit)));
            BY_REGISTER(n, put(x + i, j, get(x + i, j, count) * by, count);)
        }
}

/* x[r][h] *= sigmoid(logits[r][h]), or softplus of it; heads of n floats without gaps */
i64 gate_heads(float *x, i64 rows, i64 heads, i64 n, const float *logits, i64 logits_step, i64 is_softplus)
{
    Gates job = {x, rows, n, heads, logits, logits_step, is_softplus};
    pool_run(head_gates_piece, &job, pieces_of(rows, heads * n));
    return 0;
}

/* x[r] *= sigmoid(logits[r]), rows of n floats, with steps from row to row */
i64 multiply_by_sigmoid(float *x, i64 rows, i64 n, i64 step, const float *logits, i64 logits_step)
{
    Gates job = {x, rows, n, step, logits, logits_step, 0};
    pool_run(sigmoid_piece, &job, pieces_of(rows, n));
    return 0;
}
