/* Layer normalisation of rows. Contract: kernels/rows.py. A row's sums go over every 16th element, in order. */

typedef struct {
    float *x;
    const float *delta; /* added to x first; 0: nothing is */
    i64 rows, n, x_step, delta_step;
    const float *weight, *bias;
    float eps, *y;
} LayerNorm;

/* Returns x - mean, and 0 where there is no element. */
INLINE vf centred(const float *x, int j, i64 count, float mean)
{
    float some[16] = {};
    vf v = get(x, j, count) - mean;
    if (count >= (j + 1) * VL) return v;
    put(some, j, v, count);
    return *(const vf *)(some + j * VL);
}

static void layer_norm_piece(const void *about, i64 piece)
{
    const LayerNorm *job = about;
    i64 n = job->n, end = least((piece + 1) * rows_of_piece(n), job->rows);
    for (i64 r = piece * rows_of_piece(n); r < end; r++) {
        float *x = job->x + r * job->x_step, *y = job->y + r * n;
        const float *delta = job->delta + r * job->delta_step;
        vf total[SPAN] = {}, squares[SPAN] = {};
        if (job->delta) BY_REGISTER(n, put(x + i, j, get(x + i, j, count) + get(delta + i, j, count), count);)
        BY_REGISTER(n, total[j] += get(x + i, j, count);)
        float mean = sum16(total) / (float)n;
        BY_REGISTER(n, vf v = centred(x + i, j, count, mean); squares[j] = multiply_add(v, v, squares[j]);)
        float by = 1 / sqrtf(sum16(squares) / (float)n + job->eps);
        BY_REGISTER(n, vf v = (get(x + i, j, count) - mean) * by;
                    v = multiply_add(v, get(job->weight + i, j, count), get(job->bias + i, j, count));
                    put(y + i, j, v, count);)
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
