/* The experts' feed-forward of rows sorted by slot, in one call: what the activation makes of x G^T and x U^T, then D^T.
   Each slot's weights are read once for all its rows. */
#include "pool.h"
#include "integer_gemm.h"
#include "tile_gemm.h"

enum { SILU, CLAMPED_SWIGLU, RELU2 /* which has no gate */, CLAMPED_SILU }; /* as in kernels/forms.py; experts.py has the same order */
enum { CHUNK_BYTES = 8 << 20 /* of parts of rows */ };

typedef struct { /* as experts.py fills it */
    i64 slots, hidden, width, kind, by_channel /* E4M3: where scales are not by block */, activation;
    const char *gate_up; /* [slots][width / 32][hidden][32 of gate, 32 of up]; without a gate up, [slots][packed] */
    const char *down;    /* [slots][packed] */
    /* 0, or INT8, and E4M3 by channel: [slots, stacks width] and [slots, hidden]; E4M3 by 128 x 128: [slots, stacks
       ceil(width), ceil(hidden)] and [slots, ceil(hidden), ceil(width)]; MXFP4: their exponents, packed as bytes
       [stacks width, hidden / 32] and [hidden, width / 32] of each slot. stacks: 2, or 1 without a gate */
    const void *gate_up_scale, *down_scale;
    const float *gate_up_bias, *down_bias; /* 0, or [slots, stacks width] and [slots, hidden] */
    const i64 *held; /* 0, or [slots]: the expert of each slot, by which all that is [slots, ...] above is found */
    double alpha, limit;                   /* of CLAMPED_SWIGLU; CLAMPED_SILU has a limit */
    const Groups *gate_up_groups, *down_groups; /* GROUPS: their forms; activations are quantised for both, or for none */
} Experts;

typedef struct {
    const Experts *e;
    const i64 *rows_per_slot;
    const float *x;
    float *middle, *y; /* middle: [rows, width to a multiple of 32], packed */
    i64 x_row, y_row, slab_rows, pieces, row_block;
    char *x_parts, *middle_parts; /* by tiles: of the chunk's rows and of their middle, or 0 */
    RowChunk *x_int8, *middle_int8; /* by products of integers: the same, or 0 */
} ExpertsJob;

/* A block of a slot's rows: where its weights are, where it begins in the slot, in x, and among all slots' rows. */
typedef struct { i64 slot, expert, rows, top, at, packed_at; } SlotRows;

typedef struct {
    SlotRows before; /* the block before the first one */
    i64 blocks, rows;
} Chunk;

typedef struct {
    const ExpertsJob *job;
    const Chunk *chunk;
    char *wide; /* MXFP4 by tiles: see Panel */
} ChunkJob;

/* Goes to the next block with rows; returns 0 behind the last one. Begins with {.slot = -1}. */
INLINE i64 next_block(const ExpertsJob *j, SlotRows *s)
{
    s->packed_at += s->rows, s->top += s->rows;
    while (s->slot < 0 || s->top >= j->rows_per_slot[s->slot]) {
        if (++s->slot == j->e->slots) return 0;
        s->top = 0;
    }
    s->expert = j->e->held ? j->e->held[s->slot] : s->slot;
    s->rows = least(j->row_block, j->rows_per_slot[s->slot] - s->top);
    s->at = j->slab_rows ? s->slot * j->slab_rows + s->top : s->packed_at;
    return 1;
}

/* Where a block begins among the rows of the chunk. */
INLINE i64 row_in_chunk(const Chunk *chunk, SlotRows s) { return s.packed_at - chunk->before.packed_at - chunk->before.rows; }

/* Where its parts are among the chunk's. */
INLINE char *parts_at(char *parts, const Chunk *chunk, SlotRows s, i64 k)
{
    return parts + parts_bytes(row_in_chunk(chunk, s), k);
}

/* The same of rows in int8, of which it points to each. */
INLINE void int8_at(RowChunk *rows, const Chunk *chunk, SlotRows s, i64 k, const RowChunk **to)
{
    for (i64 r = 0; r < s.rows; r++) to[r] = rows + (row_in_chunk(chunk, s) + r) * row_chunks(k);
}

INLINE vf activate(const Experts *e, vf gate, vf up)
{
    if (e->activation == SILU) return gate / (1.0f + exp_vf(-gate)) * up;
    vf limit = splat((float)e->limit);
    gate = pick(gate > limit, limit, gate); /* NaN stays */
    up = pick(up > limit, limit, pick(up < -limit, -limit, up));
    if (e->activation == CLAMPED_SILU) return gate / (1.0f + exp_vf(-gate)) * up;
    return (up + 1.0f) * (gate / (1.0f + exp_vf(gate * -(float)e->alpha)));
}

/* Matrices of an expert's width in gate_up. */
INLINE i64 stacks_of(const Experts *e) { return e->activation == RELU2 ? 1 : 2; }

/* Activates a row of one panel of gate and up, 32 columns, or of up alone, so many columns. */
INLINE void activate_row(const Experts *e, const float *both, i64 columns, float *middle)
{
    if (e->activation == RELU2) {
        for (i64 c = 0; c < columns; c += VL) {
            vf up = *(const vf *)(both + c), positive = pick(up < 0.0f, (vf){}, up); /* NaN stays */
            *(vf *)(middle + c) = positive * positive;
        }
        return;
    }
    for (i64 c = 0; c < 32; c += VL)
        *(vf *)(middle + c) = activate(e, *(const vf *)(both + c), *(const vf *)(both + 32 + c));
}

/* The scales of one slot's stacks of n rows: a scale per row, or per block. */
INLINE const float *scales_of(const Experts *e, const void *scale, i64 slot, i64 stacks, i64 n, i64 k)
{
    if (e->kind == INT8 || e->by_channel) return (const float *)scale + slot * stacks * n;
    if (e->kind != E4M3) return 0;
    return block_scales(scale, slot * stacks * ((n + SCALE_GROUP - 1) / SCALE_GROUP), k);
}

/* The exponents of a panel of one slot's packed weight [n, k] in MXFP4; 0: none. */
INLINE const uint8_t *exponents_of(const void *scale, i64 kind, i64 slot, i64 n, i64 k, i64 panel)
{
    if (kind != MXFP4) return 0;
    const char *of_slot = (const char *)scale + slot * packed_bytes(n, k / MX_BLOCK, INT8);
    return (const uint8_t *)panel_at(of_slot, panel, k / MX_BLOCK, INT8);
}

INLINE void scale_columns(float *y, const float *scale, i64 count)
{
    for (i64 c = 0; c < count; c++) y[c] *= scale[c];
}

INLINE void add_columns(float *y, const float *bias, i64 count)
{
    for (i64 c = 0; c < count; c++) y[c] += bias[c];
}

/* Writes steps of k of the middle's parts from `step` on: the columns of one panel, 32 in each. */
static void write_middle_parts(const Experts *e, float (*both)[PANEL], i64 rows, i64 step, i64 columns, char *parts)
{
    for (i64 r = 0; r < rows; r++) {
        i64 first = r / TILE_GROUP * TILE_GROUP, count = least(TILE_GROUP, rows - first);
        char *to = parts + parts_bytes(first, e->width) + (step * ROW_PARTS * count + r - first) * LINE;
        float middle[PANEL];
        activate_row(e, both[r], columns, middle);
        for (i64 c = 0; c < columns; c += 16)
            split16(*(const v16 *)(middle + c), to + c / 32 * ROW_PARTS * count * LINE + c % 32 * 2, count * LINE);
    }
}

static void gate_up_rows(const ChunkJob *c, i64 panel, SlotRows s)
{
    const ExpertsJob *j = c->job;
    const Experts *e = j->e;
    i64 padded = padded_to_32(e->width), stacks = stacks_of(e), width = panel_width(stacks * padded, panel);
    i64 columns = width / stacks, column = panel * PANEL / stacks, wanted = least(columns, e->width - column);
    const Groups *g = e->gate_up_groups;
    const char *gate_up = e->gate_up + s.expert * weight_bytes(stacks * padded, e->hidden, e->kind, g);
    Panel p = {e->kind, width, e->hidden, weight_panel(gate_up, panel, e->hidden, e->kind, g), .wide = c->wide, .groups = g};
    const RowChunk *in_int8[ROW_BLOCK];
    const float *scale = scales_of(e, e->gate_up_scale, s.expert, stacks, e->width, e->hidden), *x[ROW_BLOCK];
    float both[ROW_BLOCK][PANEL], channels[PANEL], *y[ROW_BLOCK];
    i64 block_rows = (e->width + SCALE_GROUP - 1) / SCALE_GROUP;
    p.exponents = exponents_of(e->gate_up_scale, e->kind, s.expert, stacks * padded, e->hidden, panel);
    for (i64 half = 0; half < 2 && e->kind == E4M3 && !e->by_channel; half++)
        p.scale[half] = block_scales(scale, half % stacks * block_rows + column / SCALE_GROUP, e->hidden);
    for (i64 stack = 0; stack < stacks && e->by_channel; stack++)
        channel_scales(scale + stack * e->width + column, wanted, columns, channels + stack * 32), p.channels = channels;
    for (i64 r = 0; r < s.rows; r++) x[r] = j->x + (s.at + r) * j->x_row, y[r] = both[r];
    if (j->x_int8) int8_at(j->x_int8, c->chunk, s, e->hidden, in_int8), integer_product(&p, s.rows, in_int8, y);
    else if (j->x_parts) panel_product_by_tiles(&p, s.rows, parts_at(j->x_parts, c->chunk, s, e->hidden), y);
    else product_of_floats(&p, &(Rows){s.rows, x, 0, y});
    for (i64 r = 0; r < s.rows; r++) {
        for (i64 stack = 0; stack < stacks && e->kind == INT8; stack++)
            scale_columns(both[r] + stack * 32, scale + stack * e->width + column, wanted);
        for (i64 stack = 0; stack < stacks && e->gate_up_bias; stack++)
            add_columns(both[r] + stack * 32, e->gate_up_bias + (stacks * s.expert + stack) * e->width + column, wanted);
        if (!j->x_parts) activate_row(e, both[r], columns, j->middle + (s.packed_at + r) * padded + column);
    }
    if (j->x_parts)
        write_middle_parts(e, both, s.rows, column / 32, columns, parts_at(j->middle_parts, c->chunk, s, e->width));
}

static void down_rows(const ChunkJob *c, i64 panel, SlotRows s)
{
    const ExpertsJob *j = c->job;
    const Experts *e = j->e;
    const Groups *g = e->down_groups;
    const char *down = e->down + s.expert * weight_bytes(e->hidden, e->width, e->kind, g);
    Panel p = {e->kind, panel_width(e->hidden, panel), e->width, weight_panel(down, panel, e->width, e->kind, g),
               .wide = c->wide, .groups = g};
    const RowChunk *in_int8[ROW_BLOCK];
    const float *scale = scales_of(e, e->down_scale, s.expert, 1, e->hidden, e->width), *x[ROW_BLOCK];
    i64 column = panel * PANEL, wanted = least(p.width, e->hidden - column);
    float *y[ROW_BLOCK], spare[ROW_BLOCK][PANEL], channels[PANEL];
    p.exponents = exponents_of(e->down_scale, e->kind, s.expert, e->hidden, e->width, panel);
    if (e->by_channel) channel_scales(scale + column, wanted, p.width, channels), p.channels = channels;
    else if (e->kind == E4M3) p.scale[0] = p.scale[1] = block_scales(scale, column / SCALE_GROUP, e->width);
    for (i64 r = 0; r < s.rows; r++) {
        x[r] = j->middle + (s.packed_at + r) * padded_to_32(e->width);
        y[r] = wanted == p.width ? j->y + (s.at + r) * j->y_row + column : spare[r];
    }
    if (j->x_int8) int8_at(j->middle_int8, c->chunk, s, e->width, in_int8), integer_product(&p, s.rows, in_int8, y);
    else if (j->x_parts) panel_product_by_tiles(&p, s.rows, parts_at(j->middle_parts, c->chunk, s, e->width), y);
    else product_of_floats(&p, &(Rows){s.rows, x, 0, y});
    for (i64 r = 0; r < s.rows; r++) {
        if (e->kind == INT8) scale_columns(y[r], scale + column, wanted);
        if (e->down_bias) add_columns(y[r], e->down_bias + s.expert * e->hidden + column, wanted);
        if (wanted < p.width) memcpy(j->y + (s.at + r) * j->y_row + column, spare[r], wanted * 4);
    }
}

/* Splits a block's rows for tiles. */
static void split_block(const ChunkJob *c, i64 panel, SlotRows s)
{
    const ExpertsJob *j = c->job;
    const float *x[ROW_BLOCK];
    (void)panel; /* the only one */
    for (i64 r = 0; r < s.rows; r++) x[r] = j->x + (s.at + r) * j->x_row;
    split_rows(x, s.rows, j->e->hidden, parts_at(j->x_parts, c->chunk, s, j->e->hidden));
}

/* Quantises a block's rows, and what the activation has made of them. */
static void quantise_block(const ChunkJob *c, i64 panel, SlotRows s)
{
    const ExpertsJob *j = c->job;
    i64 hidden = j->e->hidden, first = row_in_chunk(c->chunk, s);
    (void)panel; /* the only one */
    for (i64 r = 0; r < s.rows; r++)
        quantise_row(j->x + (s.at + r) * j->x_row, hidden, j->e->gate_up_groups,
                     j->x_int8 + (first + r) * row_chunks(hidden));
}

static void quantise_middle(const ChunkJob *c, i64 panel, SlotRows s)
{
    const ExpertsJob *j = c->job;
    i64 width = j->e->width, first = row_in_chunk(c->chunk, s);
    (void)panel;
    for (i64 r = 0; r < s.rows; r++)
        quantise_row(j->middle + (s.packed_at + r) * padded_to_32(width), width, j->e->down_groups,
                     j->middle_int8 + (first + r) * row_chunks(width));
}

typedef void (*PanelRows)(const ChunkJob *, i64 panel, SlotRows);

/* Calls for the panels of one piece, among those of all blocks of the chunk. */
INLINE void expert_panels(const ChunkJob *c, i64 panels, i64 piece, PanelRows rows_by_panel)
{
    i64 items = c->chunk->blocks * panels, pieces = c->job->pieces;
    i64 from = items * piece / pieces, to = items * (piece + 1) / pieces;
    SlotRows s = c->chunk->before;
    if (c->job->x_parts) tiles_begin();
    for (i64 item = 0; item < to && next_block(c->job, &s); item += panels)
        for (i64 panel = item < from ? least(from - item, panels) : 0; panel < panels && item + panel < to; panel++)
            rows_by_panel(c, panel, s);
    if (c->job->x_parts) tiles_end();
}

static void split_piece(const void *job, i64 piece) { expert_panels(job, 1, piece, split_block); }
static void quantise_piece(const void *job, i64 piece) { expert_panels(job, 1, piece, quantise_block); }
static void quantise_middle_piece(const void *job, i64 piece) { expert_panels(job, 1, piece, quantise_middle); }

/* As above, with room for a panel of that k in bfloat16 where tiles need it. */
static void weight_panels(const ChunkJob *c, i64 panels, i64 piece, PanelRows rows_by_panel, i64 k)
{
    ChunkJob own = *c; /* of this thread */
    if (c->job->x_parts && c->job->e->kind == MXFP4) own.wide = parts_room(packed_bytes(PANEL, k, BFLOAT16));
    expert_panels(&own, panels, piece, rows_by_panel);
    free(own.wide);
}

static void gate_up_piece(const void *job, i64 piece)
{
    const ChunkJob *c = job;
    i64 panels = num_panels(stacks_of(c->job->e) * padded_to_32(c->job->e->width));
    weight_panels(c, panels, piece, gate_up_rows, c->job->e->hidden);
}

static void down_piece(const void *job, i64 piece)
{
    const ChunkJob *c = job;
    weight_panels(c, num_panels(c->job->e->hidden), piece, down_rows, c->job->e->width);
}

/* Returns the blocks behind `before`: one, and more as long as all have no more than most_rows. */
static Chunk chunk_behind(const ExpertsJob *j, SlotRows before, i64 most_rows)
{
    Chunk chunk = {before, 0, 0};
    for (SlotRows s = before; next_block(j, &s) && (!chunk.blocks || chunk.rows + s.rows <= most_rows); chunk.blocks++)
        chunk.rows += s.rows;
    return chunk;
}

/* x, y: rows sorted by slot, one after the other, or slot s from row s * slab_rows on; row strides in floats
   middle: room for [rows, width to a multiple of 32] */
i64 expert_ffn(const Experts *facts, const float *x, i64 x_row, const i64 *rows_per_slot, i64 slab_rows, float *middle,
               float *y, i64 y_row)
{
    i64 tiled = by_tiles(facts->kind), per_row = parts_bytes(1, facts->hidden) + parts_bytes(1, facts->width);
    i64 integers = by_integers(facts->kind, facts->gate_up_groups), chunks = row_chunks(facts->hidden);
    if (integers) per_row = (chunks + row_chunks(facts->width)) * sizeof(RowChunk);
    i64 most_rows = tiled || integers ? CHUNK_BYTES / (per_row + 1) : INT64_MAX;
    ExpertsJob job = {facts, rows_per_slot, x, middle, y, x_row, y_row, slab_rows, 1, ROW_BLOCK, 0, 0, 0, 0};
    if (pool_threads() > 1) job.pieces = 16 * pool_threads();
    if (tiled) job.row_block = tile_row_block(facts->hidden);
    Chunk chunk;
    for (SlotRows at = {.slot = -1}; (chunk = chunk_behind(&job, at, most_rows)).blocks;) {
        ChunkJob part = {&job, &chunk, 0};
        if (tiled) {
            job.x_parts = parts_room(chunk.rows * per_row);
            job.middle_parts = job.x_parts + parts_bytes(chunk.rows, facts->hidden);
            pool_run(split_piece, &part, job.pieces);
        }
        if (integers) {
            job.x_int8 = row_chunks_room(chunk.rows, facts->hidden + GROUP_CHUNK + facts->width);
            job.middle_int8 = job.x_int8 + chunk.rows * chunks;
            pool_run(quantise_piece, &part, job.pieces);
        }
        pool_run(gate_up_piece, &part, job.pieces);
        if (integers) pool_run(quantise_middle_piece, &part, job.pieces);
        pool_run(down_piece, &part, job.pieces);
        free(job.x_parts), free(job.x_int8);
        for (i64 i = 0; i < chunk.blocks; i++) next_block(&job, &at);
    }
    return 0;
}
