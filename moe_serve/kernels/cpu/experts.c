/* The experts' feed-forward of rows sorted by slot, in one call: what the activation makes of x G^T and x U^T, then D^T.
   Each slot's weights are read once for all its rows. */
#include "gemm.h"
#include "pool.h"

enum { SILU, CLAMPED_SWIGLU }; /* as in kernels/activation.py; experts.py has the same order */

typedef struct { /* as experts.py fills it */
    i64 slots, hidden, width, kind, activation;
    const char *gate_up; /* [slots][width / 32][hidden][32 of gate, 32 of up] */
    const char *down;    /* [slots][packed] */
    /* 0, or INT8: [slots, 2 width] and [slots, hidden]; E4M3: by 128 x 128, [slots, 2 ceil(width), ceil(hidden)] and
       [slots, ceil(hidden), ceil(width)] */
    const float *gate_up_scale, *down_scale;
    const float *gate_up_bias, *down_bias; /* 0, or [slots, 2 width] and [slots, hidden] */
    double alpha, limit;                   /* of CLAMPED_SWIGLU */
} Experts;

typedef struct {
    const Experts *e;
    const i64 *rows_per_slot;
    const float *x;
    float *middle, *y; /* middle: [rows, width to a multiple of 32], packed */
    i64 x_row, y_row, slab_rows, pieces;
} ExpertsJob;

typedef struct { i64 rows, at, packed_at; } SlotRows; /* where a slot's rows begin in x, and among those with rows */

INLINE v16 activate(const Experts *e, v16 gate, v16 up)
{
    if (e->activation == SILU) return gate / (1.0f + exp16(-gate)) * up;
    v16 limit = (v16){} + (float)e->limit;
    gate = pick16(gate > limit, limit, gate); /* NaN stays */
    up = pick16(up > limit, limit, pick16(up < -limit, -limit, up));
    return (up + 1.0f) * (gate / (1.0f + exp16(gate * -(float)e->alpha)));
}

/* The scales of a row of 128 x 128 blocks. */
INLINE const float *block_scales(const float *scale, i64 block_row, i64 k)
{
    return scale + block_row * ((k + SCALE_GROUP - 1) / SCALE_GROUP);
}

/* The scales of one slot's stacks of n rows: a scale per row, or per block. */
INLINE const float *scales_of(const float *scale, i64 kind, i64 slot, i64 stacks, i64 n, i64 k)
{
    if (kind == INT8) return scale + slot * stacks * n;
    if (kind != E4M3) return 0;
    return block_scales(scale, slot * stacks * ((n + SCALE_GROUP - 1) / SCALE_GROUP), k);
}

INLINE void scale_columns(float *y, const float *scale, i64 count)
{
    for (i64 c = 0; c < count; c++) y[c] *= scale[c];
}

INLINE void add_columns(float *y, const float *bias, i64 count)
{
    for (i64 c = 0; c < count; c++) y[c] += bias[c];
}

static void gate_up_rows(const ExpertsJob *j, i64 slot, i64 panel, SlotRows s)
{
    const Experts *e = j->e;
    i64 padded = padded_to_32(e->width), column = panel * 32, wanted = least(32, e->width - column);
    const char *gate_up = e->gate_up + slot * packed_bytes(2 * padded, e->hidden, e->kind);
    Panel p = {e->kind, PANEL, e->hidden, panel_at(gate_up, panel, e->hidden, e->kind), {0, 0}};
    const float *scale = scales_of(e->gate_up_scale, e->kind, slot, 2, e->width, e->hidden), *x[ROW_BLOCK];
    float both[ROW_BLOCK][PANEL], *y[ROW_BLOCK];
    i64 block_rows = (e->width + SCALE_GROUP - 1) / SCALE_GROUP;
    for (i64 half = 0; half < 2 && e->kind == E4M3; half++)
        p.scale[half] = block_scales(scale, half * block_rows + column / SCALE_GROUP, e->hidden);
    for (i64 r = 0; r < s.rows; r++) x[r] = j->x + (s.at + r) * j->x_row, y[r] = both[r];
    panel_product(&p, &(Rows){s.rows, x, 0, y});
    for (i64 r = 0; r < s.rows; r++) {
        for (i64 half = 0; half < 2 && e->kind == INT8; half++)
            scale_columns(both[r] + half * 32, scale + half * e->width + column, wanted);
        for (i64 half = 0; half < 2 && e->gate_up_bias; half++)
            add_columns(both[r] + half * 32, e->gate_up_bias + (2 * slot + half) * e->width + column, wanted);
        for (i64 c = 0; c < 32; c += 16)
            *(v16 *)(j->middle + (s.packed_at + r) * padded + column + c) =
                activate(e, *(v16 *)(both[r] + c), *(v16 *)(both[r] + 32 + c));
    }
}

static void down_rows(const ExpertsJob *j, i64 slot, i64 panel, SlotRows s)
{
    const Experts *e = j->e;
    const char *down = e->down + slot * packed_bytes(e->hidden, e->width, e->kind);
    Panel p = {e->kind, panel_width(e->hidden, panel), e->width, panel_at(down, panel, e->width, e->kind), {0, 0}};
    const float *scale = scales_of(e->down_scale, e->kind, slot, 1, e->hidden, e->width), *x[ROW_BLOCK];
    i64 column = panel * PANEL, wanted = least(p.width, e->hidden - column);
    float *y[ROW_BLOCK], spare[ROW_BLOCK][PANEL];
    if (e->kind == E4M3) p.scale[0] = p.scale[1] = block_scales(scale, column / SCALE_GROUP, e->width);
    for (i64 r = 0; r < s.rows; r++) {
        x[r] = j->middle + (s.packed_at + r) * padded_to_32(e->width);
        y[r] = wanted == p.width ? j->y + (s.at + r) * j->y_row + column : spare[r];
    }
    panel_product(&p, &(Rows){s.rows, x, 0, y});
    for (i64 r = 0; r < s.rows; r++) {
        if (e->kind == INT8) scale_columns(y[r], scale + column, wanted);
        if (e->down_bias) add_columns(y[r], e->down_bias + slot * e->hidden + column, wanted);
        if (wanted < p.width) memcpy(j->y + (s.at + r) * j->y_row + column, spare[r], wanted * 4);
    }
}

typedef void (*PanelRows)(const ExpertsJob *, i64 slot, i64 panel, SlotRows);

/* Calls for the panels of one piece, among those of all slots with rows, and for blocks of each slot's rows. */
INLINE void expert_panels(const ExpertsJob *j, i64 panels, i64 piece, PanelRows rows_by_panel)
{
    i64 active = 0, item = 0, row = 0;
    for (i64 slot = 0; slot < j->e->slots; slot++) active += j->rows_per_slot[slot] > 0;
    i64 from = active * panels * piece / j->pieces, to = active * panels * (piece + 1) / j->pieces;
    for (i64 slot = 0; slot < j->e->slots && item < to; slot++) {
        i64 rows = j->rows_per_slot[slot], at = j->slab_rows ? slot * j->slab_rows : row;
        if (!rows) continue;
        for (i64 panel = 0; panel < panels; panel++, item++)
            for (i64 top = 0; top < rows && from <= item && item < to; top += ROW_BLOCK)
                rows_by_panel(j, slot, panel, (SlotRows){least(ROW_BLOCK, rows - top), at + top, row + top});
        row += rows;
    }
}

static void gate_up_piece(const void *job, i64 piece)
{
    const ExpertsJob *j = job;
    expert_panels(j, padded_to_32(j->e->width) / 32, piece, gate_up_rows);
}

static void down_piece(const void *job, i64 piece)
{
    const ExpertsJob *j = job;
    expert_panels(j, num_panels(j->e->hidden), piece, down_rows);
}

/* x, y: rows sorted by slot, one after the other, or slot s from row s * slab_rows on; row strides in floats
   middle: room for [rows, width to a multiple of 32] */
i64 expert_ffn(const Experts *facts, const float *x, i64 x_row, const i64 *rows_per_slot, i64 slab_rows, float *middle,
               float *y, i64 y_row)
{
    ExpertsJob job = {facts, rows_per_slot, x, middle, y, x_row, y_row, slab_rows, 1};
    if (pool_threads() > 1) job.pieces = 16 * pool_threads();
    pool_run(gate_up_piece, &job, job.pieces);
    pool_run(down_piece, &job, job.pieces);
    return 0;
}
