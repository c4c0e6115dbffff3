/* What moves data between the kernels of a recorded step. */
#include "groups.h"
#include "pool.h"

#include <math.h>

/* [rows, heads, width], with strides of rows and heads in floats */
i64 copy_heads(const float *from, i64 rows, i64 heads, i64 width, i64 from_row, i64 from_head, float *to, i64 to_row,
               i64 to_head)
{
    for (i64 r = 0; r < rows; r++)
        for (i64 h = 0; h < heads; h++)
            memcpy(to + r * to_row + h * to_head, from + r * from_row + h * from_head, width * 4);
    return 0;
}

typedef struct {
    const void *table;
    i64 kind, is_packed, table_rows, width;
    const Groups *groups; /* GROUPS only */
    const i64 *ids;
    float *out;
} Gather;

INLINE float widened_bf16(uint16_t from)
{
    uint32_t bits = (uint32_t)from << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

/* Words of a packed row lie a panel's width apart, each in a cache line of its own, so lines are asked for ahead. */
static void gather_packed_row(const Gather *g, i64 id, float *out)
{
    enum { AHEAD = 32 };
    i64 panel = id / PANEL, step = panel_width(g->table_rows, panel);
    const uint32_t *at = (const uint32_t *)panel_at(g->table, panel, g->width, g->kind) + id % PANEL;
    for (i64 c = 0; c < g->width; c += k_per_word(g->kind), at += step) {
        __builtin_prefetch(at + AHEAD * step, 0, 1);
        if (g->kind == FLOAT32) memcpy(out + c, at, 4);
        else out[c] = widened_bf16(*at & 0xffff);
        if (g->kind == BFLOAT16 && c + 1 < g->width) out[c + 1] = widened_bf16(*at >> 16);
    }
}

/* A row of a packed weight in groups. */
static void gather_grouped_row(const Gather *g, i64 id, float *out)
{
    const Groups *form = g->groups;
    i64 panel = id / PANEL, bits = form->bits == 4 ? 4 : 8, per_word = 32 / bits;
    Panel p = {GROUPS, panel_width(g->table_rows, panel), g->width,
               weight_panel(g->table, panel, g->width, GROUPS, form), .groups = form};
    _Alignas(64) char bytes[GROUP_CHUNK * PANEL];
    GroupChunk chunk;
    for (i64 start = 0; start < g->width; start += GROUP_CHUNK) {
        read_chunk(&p, start, &chunk), widen_six_bits(&p, &chunk, bytes);
        for (i64 k = 0; k < chunk.k; k++) {
            i64 i = k % per_word, at = bits == 8 || i < 4 ? 8 * i : 8 * (i - 4) + 4;
            i64 number = k / form->group * p.width + id % PANEL;
            uint32_t word;
            memcpy(&word, chunk.codes + (k / per_word * p.width + id % PANEL) * 4, 4);
            float zero = form->zero < 0 ? chunk.zero[number] : (float)form->zero;
            float code = (float)(word >> at & (bits == 8 ? 255 : 15)) - zero, scale = chunk.scale[number];
            out[start + k] = form->has_minimum ? fmaf(code, scale, -chunk.minimum[number]) : code * scale;
        }
    }
}

static void gather_row(const void *job, i64 i)
{
    const Gather *g = job;
    i64 first = g->ids[i] * g->width;
    float *out = g->out + i * g->width;
    if (g->kind == GROUPS)
        gather_grouped_row(g, g->ids[i], out);
    else if (g->is_packed)
        gather_packed_row(g, g->ids[i], out);
    else if (g->kind == FLOAT32)
        memcpy(out, (const float *)g->table + first, g->width * 4);
    else
        for (i64 c = 0; c < g->width; c++) out[c] = widened_bf16(((const uint16_t *)g->table)[first + c]);
}

/* out[i] = row ids[i] of table, widened to float32. kind: float32, bfloat16 or GROUPS; is_packed: the table is [table_rows,
   width] packed as a weight is, else its rows follow each other; fails for an id that is no row of the table */
i64 gather_rows(const void *table, i64 kind, i64 is_packed, i64 table_rows, i64 width, const Groups *groups,
                const i64 *ids, i64 num_ids, float *out)
{
    Gather gather = {table, kind, is_packed, table_rows, width, groups, ids, out};
    for (i64 i = 0; i < num_ids; i++)
        if (ids[i] < 0 || ids[i] >= table_rows) return -1;
    if (is_packed)
        pool_run(gather_row, &gather, num_ids);
    else
        for (i64 i = 0; i < num_ids; i++) gather_row(&gather, i);
    return 0;
}

/* sum += x, rows of `width` floats each */
i64 add_rows(float *sum, const float *x, i64 rows, i64 width)
{
    for (i64 i = 0; i < rows * width; i++) sum[i] += x[i];
    return 0;
}

/* out = table[ids], ids [rows, topk] below `size`; -1 for -1 */
i64 look_up(const i64 *table, i64 size, const i64 *ids, i64 rows, i64 topk, i64 *out)
{
    for (i64 i = 0; i < rows * topk; i++) {
        if (ids[i] >= size) return -1;
        out[i] = ids[i] < 0 ? -1 : table[ids[i]];
    }
    return 0;
}

/* Row slots[i] of `kept`, in which rows lie `stride` bytes apart, becomes ids [rows, topk] of `bytes` bytes each, 1 or
   2; -1 becomes the highest number. Rows without a slot are padding. */
i64 keep_ids(const i64 *ids, i64 rows, i64 topk, const i64 *slots, unsigned char *kept, i64 stride, i64 bytes)
{
    for (i64 i = 0; i < rows; i++) {
        if (slots[i] < 0) continue;
        unsigned char *row = kept + slots[i] * stride;
        for (i64 k = 0; k < topk; k++) {
            if (bytes == 1)
                row[k] = (unsigned char)ids[i * topk + k];
            else
                ((unsigned short *)row)[k] = (unsigned short)ids[i * topk + k];
        }
    }
    return 0;
}

/* counts [experts]: how many of ids [rows, topk] name each one, -1 = none */
i64 count_ids(const i64 *ids, i64 rows, i64 topk, i64 experts, i64 *counts)
{
    memset(counts, 0, experts * sizeof(i64));
    for (i64 i = 0; i < rows * topk; i++) {
        if (ids[i] >= experts) return -1;
        if (ids[i] >= 0) counts[ids[i]]++;
    }
    return 0;
}
