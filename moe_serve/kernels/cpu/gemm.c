/* Dense projections of rows, and one projection per head. */
#include "gemm.h"
#include "pool.h"

enum { ROW_BLOCK = 64 };

typedef struct { /* as linear.py fills it */
    i64 heads, n, k, kind;
    const char *weight; /* [heads][packed] */
    const float *bias;  /* [heads, n], or 0 */
} Linear;

typedef struct {
    const Linear *linear;
    const float *x;
    float *y;
    i64 rows, x_row, x_head, y_row, y_head, pieces;
} LinearJob;

static void linear_rows(const LinearJob *j, i64 head, i64 panel, i64 top)
{
    const Linear *l = j->linear;
    i64 rows = least(ROW_BLOCK, j->rows - top), width = panel_width(l->n, panel), column = panel * PANEL;
    i64 wanted = least(width, l->n - column);
    i64 head_bytes = (l->n + 31) / 32 * 32 * l->k * bytes_of(l->kind);
    const float *x[ROW_BLOCK];
    float *y[ROW_BLOCK], *out[ROW_BLOCK], spare[ROW_BLOCK][PANEL];
    for (i64 r = 0; r < rows; r++) {
        x[r] = j->x + (top + r) * j->x_row + head * j->x_head;
        out[r] = j->y + (top + r) * j->y_row + head * j->y_head + column;
        y[r] = wanted == width ? out[r] : spare[r];
    }
    panel_product(l->kind, x, rows, panel_at(l->weight + head * head_bytes, panel, l->k, l->kind), width, l->k, y);
    for (i64 r = 0; r < rows; r++) {
        for (i64 c = 0; c < wanted && l->bias; c++) y[r][c] += l->bias[head * l->n + column + c];
        if (y[r] != out[r]) memcpy(out[r], y[r], wanted * 4);
    }
}

static void linear_piece(const void *job, i64 piece)
{
    const LinearJob *j = job;
    i64 panels = num_panels(j->linear->n), items = j->linear->heads * panels;
    for (i64 at = items * piece / j->pieces; at < items * (piece + 1) / j->pieces; at++)
        for (i64 top = 0; top < j->rows; top += ROW_BLOCK) linear_rows(j, at / panels, at % panels, top);
}

/* y[r, h] = W[h] x[r, h] + bias[h]; strides in floats, of rows and of heads */
i64 linear(const Linear *facts, const float *x, i64 rows, i64 x_row, i64 x_head, float *y, i64 y_row, i64 y_head)
{
    i64 items = facts->heads * num_panels(facts->n), pieces = pool_threads() > 1 ? 8 * pool_threads() : 1;
    LinearJob job = {facts, x, y, rows, x_row, x_head, y_row, y_head, least(items, pieces)};
    pool_run(linear_piece, &job, job.pieces);
    return 0;
}
