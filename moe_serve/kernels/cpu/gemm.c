/* Dense projections of rows, and one projection per head. */
#include <stdlib.h>
#include "pool.h"
#include "integer_gemm.h"
#include "tile_gemm.h"

enum { ROW_BLOCK = 192, PACK_FROM = 32 /* rows */ };

typedef struct { /* as linear.py fills it */
    i64 heads, n, k, kind, by_channel /* E4M3: where scales are not by block */;
    const char *weight; /* [heads][packed] */
    const float *bias;  /* [heads, n], or 0 */
    const float *scale; /* E4M3: of channels, [n], or by 128 x 128, [ceil(n), ceil(k)], of one head; else 0 */
    const Groups *groups; /* GROUPS: of one head */
} Linear;

typedef struct {
    const Linear *linear;
    const float *x;
    float *y, *packed; /* packed: of one head only, or 0 */
    char *parts;       /* [heads][parts of the rows] by tiles, or 0 */
    RowChunk *in_int8; /* [rows][chunks of k] by products of integers, or 0 */
    i64 rows, x_row, x_head, y_row, y_head, pieces;
} LinearJob;

static void linear_panel(const LinearJob *j, i64 head, i64 panel)
{
    const Linear *l = j->linear;
    i64 column = panel * PANEL, head_bytes = weight_bytes(l->n, l->k, l->kind, l->groups);
    const float *x[ROW_BLOCK];
    float *y[ROW_BLOCK], *out[ROW_BLOCK], spare[ROW_BLOCK][PANEL], channels[PANEL];
    const RowChunk *q[ROW_BLOCK];
    const char *w = weight_panel(l->weight + head * head_bytes, panel, l->k, l->kind, l->groups);
    Panel p = {l->kind, panel_width(l->n, panel), l->k, w, .groups = l->groups};
    i64 wanted = least(p.width, l->n - column);
    if (l->by_channel) channel_scales(l->scale + column, wanted, p.width, channels), p.channels = channels;
    else if (l->scale) p.scale[0] = p.scale[1] = block_scales(l->scale, column / SCALE_GROUP, l->k);
    for (i64 r = 0; r < j->rows; r++) {
        x[r] = j->x + r * j->x_row + head * j->x_head;
        out[r] = j->y + r * j->y_row + head * j->y_head + column;
        y[r] = wanted == p.width ? out[r] : spare[r];
        q[r] = j->in_int8 + r * row_chunks(l->k);
    }
    if (j->in_int8) integer_product(&p, j->rows, q, y);
    else if (j->parts) panel_product_by_tiles(&p, j->rows, j->parts + head * parts_bytes(j->rows, l->k), y);
    else product_of_floats(&p, &(Rows){j->rows, x, j->packed, y});
    for (i64 r = 0; r < j->rows; r++) {
        for (i64 c = 0; c < wanted && l->bias; c++) y[r][c] += l->bias[head * l->n + column + c];
        if (y[r] != out[r]) memcpy(out[r], y[r], wanted * 4);
    }
}

static void linear_piece(const void *job, i64 piece)
{
    const LinearJob *j = job;
    i64 panels = num_panels(j->linear->n), items = j->linear->heads * panels;
    if (j->parts) tiles_begin();
    for (i64 at = items * piece / j->pieces; at < items * (piece + 1) / j->pieces; at++)
        linear_panel(j, at / panels, at % panels);
    if (j->parts) tiles_end();
}

static void pack_linear_piece(const void *job, i64 piece)
{
    const LinearJob *j = job;
    const float *x[ROW_BLOCK];
    for (i64 r = 0; r < j->rows; r++) x[r] = j->x + r * j->x_row;
    pack_rows_block(x, j->rows, j->linear->k, j->linear->kind, piece, j->packed);
}

/* Splits a group of rows of one head. */
static void split_linear_piece(const void *job, i64 piece)
{
    const LinearJob *j = job;
    const float *x[TILE_GROUP];
    i64 groups = (j->rows + TILE_GROUP - 1) / TILE_GROUP, head = piece / groups, first = piece % groups * TILE_GROUP;
    i64 count = least(TILE_GROUP, j->rows - first), k = j->linear->k;
    for (i64 r = 0; r < count; r++) x[r] = j->x + (first + r) * j->x_row + head * j->x_head;
    split_rows(x, count, k, j->parts + head * parts_bytes(j->rows, k) + parts_bytes(first, k));
}

/* Quantises a row. */
static void quantise_linear_piece(const void *job, i64 piece)
{
    const LinearJob *j = job;
    const Linear *l = j->linear;
    quantise_row(j->x + piece * j->x_row, l->k, l->groups, j->in_int8 + piece * row_chunks(l->k));
}

/* y[r, h] = W[h] x[r, h] + bias[h]; strides in floats, of rows and of heads */
i64 linear(const Linear *facts, const float *x, i64 rows, i64 x_row, i64 x_head, float *y, i64 y_row, i64 y_head)
{
    i64 tiled = by_tiles(facts->kind), integers = by_integers(facts->kind, facts->groups), row_block = tiled ? tile_row_block(facts->heads * facts->k) : ROW_BLOCK;
    i64 items = facts->heads * num_panels(facts->n), blocks = (rows + row_block - 1) / row_block;
    i64 pieces = pool_threads() > 1 ? least(items, 8 * pool_threads()) : 1, most = blocks ? (rows + blocks - 1) / blocks : 0;
    float *packed = 0; /* without memory for it, rows are read where they lie: the same bits, more slowly */
    char *parts = tiled && rows ? parts_room(facts->heads * parts_bytes(most, facts->k)) : 0;
    RowChunk *in_int8 = integers && most ? row_chunks_room(most, facts->k) : 0;
    if (most > PACK_FROM && facts->heads == 1 && !tiled && !integers) packed = malloc(row_blocks(most) * MOST_ROWS * facts->k * 4);
    for (i64 b = 0; b < blocks; b++) {
        i64 top = rows * b / blocks;
        LinearJob job = {facts, x + top * x_row, y + top * y_row, packed, parts, in_int8, rows * (b + 1) / blocks - top,
                         x_row, x_head, y_row, y_head, pieces};
        if (packed) pool_run(pack_linear_piece, &job, row_blocks(job.rows));
        if (in_int8) pool_run(quantise_linear_piece, &job, job.rows);
        if (parts) pool_run(split_linear_piece, &job, facts->heads * ((job.rows + TILE_GROUP - 1) / TILE_GROUP));
        pool_run(linear_piece, &job, pieces);
    }
    free(packed), free(parts), free(in_int8);
    return 0;
}
