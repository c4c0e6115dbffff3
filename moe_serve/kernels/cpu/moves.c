/* What moves data between the kernels of a recorded step. */
#include "vec.h"

/* [rows, heads, width], with strides of rows and heads in floats */
i64 copy_heads(const float *from, i64 rows, i64 heads, i64 width, i64 from_row, i64 from_head, float *to, i64 to_row,
               i64 to_head)
{
    for (i64 r = 0; r < rows; r++)
        for (i64 h = 0; h < heads; h++)
            memcpy(to + r * to_row + h * to_head, from + r * from_row + h * from_head, width * 4);
    return 0;
}

/* out[i] = table[ids[i]], rows of `width`, widened to float32. kind: 0 float32, 1 bfloat16; fails for an id that is no
   row of the table */
i64 gather_rows(const void *table, i64 kind, i64 table_rows, i64 width, const i64 *ids, i64 num_ids, float *out)
{
    for (i64 i = 0; i < num_ids; i++, out += width) {
        if (ids[i] < 0 || ids[i] >= table_rows) return -1;
        if (!kind) {
            memcpy(out, (const float *)table + ids[i] * width, width * 4);
            continue;
        }
        const uint16_t *row = (const uint16_t *)table + ids[i] * width;
        for (i64 c = 0; c < width; c++) {
            uint32_t bits = (uint32_t)row[c] << 16;
            memcpy(out + c, &bits, 4);
        }
    }
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
