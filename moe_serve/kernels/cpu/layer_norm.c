/* Layer normalisation of rows. Contract: kernels/layer_norm.py. A row's sums go over every 16th element, in order. */

typedef struct {
    float *x;
    const float *delta; /* added to x first; 0: nothing is */
    i64 rows, n, x_step, delta_step;
    const float *weight, *bias;
    float eps, *y;
} LayerNorm;

/* Returns x - mean, and 0 where there is no element. */
INLINE v16 centred(const float *x, i64 count, float mean)
{
    v16 v = get(x, count) - mean;
    if (count >= 16) return v;
    float some[16] = {};
    store_some(some, v, count);
    memcpy(&v, some, 64);
    return v;
}

static void layer_norm_piece(const void *about, i64 piece)
{
    const LayerNorm *job = about;
    i64 n = job->n, end = least((piece + 1) * rows_of_piece(n), job->rows);
    for (i64 r = piece * rows_of_piece(n); r < end; r++) {
        float *x = job->x + r * job->x_step, *y = job->y + r * n;
        const float *delta = job->delta + r * job->delta_step;
        v16 total = {}, squares = {};
        for (i64 i = 0; i < n; i += 16) {
            v16 v = get(x + i, n - i);
            if (job->delta) put(x + i, v += get(delta + i, n - i), n - i);
            total += v;
        }
        float mean = sum16(total) / (float)n;
        for (i64 i = 0; i < n; i += 16) {
            v16 v = centred(x + i, n - i, mean);
            squares += v * v;
        }
        float by = 1 / sqrtf(sum16(squares) / (float)n + job->eps);
        for (i64 i = 0; i < n; i += 16) {
            v16 v = (get(x + i, n - i) - mean) * by;
            put(y + i, v * get(job->weight + i, n - i) + get(job->bias + i, n - i), n - i);
        }
    }
}

/* x [rows, n] with x_step floats from row to row, plus delta, which stays in x, unless delta is 0 -> y [rows, n];
   eps: the bits of a double */
i64 layer_norm(float *x, const float *delta, i64 rows, i64 n, i64 x_step, i64 delta_step, const float *weight,
               const float *bias, i64 eps, float *y)
{
    LayerNorm job = {x, delta, rows, n, x_step, delta_step, weight, bias, as_float(eps), y};
    pool_run(layer_norm_piece, &job, pieces_of(rows, n));
    return 0;
}
