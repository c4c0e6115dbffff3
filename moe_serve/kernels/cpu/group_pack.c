/* Weights in groups brought into the order that groups.h describes. */
#include "pool.h"

enum { PACKED_CHUNK = 128, PACKED_SUPER = 256, PACKED_PANEL = 64, PACKED_HALF = 32, PACKED_STEP = 32 };

/* Numbers of groups, or of super groups: entries [rows, entries] of size bytes each. */
typedef struct {
    const uint8_t *entries;
    i64 count, size, of_super;
} GroupField;

typedef struct {
    const uint8_t *codes; /* [rows, k] */
    i64 rows, k, bits, group, gate_up, row_bytes, num_fields;
    const GroupField *fields;
    uint8_t *out;
} PackJob;

/* The row of the weight in a column of a panel; -1: none, it is padded. */
INLINE i64 packed_row(const PackJob *j, i64 panel, i64 column)
{
    i64 width = j->rows / 2, row = panel * PACKED_PANEL + column;
    if (!j->gate_up) return row < j->rows ? row : -1;
    row = panel * PACKED_HALF + column % PACKED_HALF;
    return row < width ? column / PACKED_HALF * width + row : -1;
}

static void pack_codes(const PackJob *j, const uint8_t *codes, i64 count, i64 columns, uint8_t *to)
{
    i64 words = (count + PACKED_STEP - 1) / PACKED_STEP * PACKED_STEP / 4 /* of four codes each */, step = columns * 4;
    uint32_t four[PACKED_CHUNK / 4] = {0};
    if (codes) memcpy(four, codes, count);
    for (i64 w = 0; w < words && j->bits == 8; w++, to += step) memcpy(to, four + w, 4);
    for (i64 w = 0; w < words && j->bits < 8; w += 2, to += step) {
        uint32_t word = (four[w] & 0x0f0f0f0f) | (four[w + 1] & 0x0f0f0f0f) << 4;
        memcpy(to, &word, 4);
    }
    for (i64 w = 0; w < words && j->bits == 6; w += 4, to += step) {
        uint32_t upper = 0;
        for (i64 i = 0; i < 4; i++) upper |= (four[w + i] >> 4 & 0x03030303) << 2 * i;
        memcpy(to, &upper, 4);
    }
}

static void pack_panel(const void *job, i64 panel)
{
    const PackJob *j = job;
    i64 padded = j->gate_up ? 2 * ((j->rows / 2 + PACKED_HALF - 1) / PACKED_HALF * PACKED_HALF)
                            : (j->rows + PACKED_HALF - 1) / PACKED_HALF * PACKED_HALF;
    i64 columns = least(PACKED_PANEL, padded - panel * PACKED_PANEL), of_chunk = PACKED_CHUNK / j->group;
    uint8_t *to = j->out + panel * PACKED_PANEL * j->row_bytes;
    for (i64 start = 0; start < j->k; start += PACKED_CHUNK) {
        for (i64 f = 0; f < j->num_fields; f++) {
            const GroupField *field = j->fields + f;
            i64 first = field->of_super ? start / PACKED_SUPER : start / j->group, size = field->size;
            i64 count = field->of_super ? 1 : least(of_chunk, field->count - first);
            for (i64 c = 0; c < columns; c++) {
                i64 row = packed_row(j, panel, c);
                const uint8_t *from = field->entries + (row * field->count + first) * size;
                for (i64 i = 0; i < count; i++) {
                    uint8_t *place = to + (i * columns + c) * size;
                    row < 0 ? memset(place, 0, size) : memcpy(place, from + i * size, size);
                }
            }
            to += count * columns * size;
        }
        i64 count = least(PACKED_CHUNK, j->k - start);
        for (i64 c = 0; c < columns; c++) {
            i64 row = packed_row(j, panel, c);
            pack_codes(j, row < 0 ? 0 : j->codes + row * j->k + start, count, columns, to + c * 4);
        }
        to += (count + PACKED_STEP - 1) / PACKED_STEP * PACKED_STEP * j->bits / 8 * columns;
    }
}

/* codes [rows, k] and the numbers of their groups, in the order in which they lie beside them -> out [packed rows x
   row_bytes]. gate_up: rows are those of gate, then those of up. Returns the packed rows. */
i64 pack_groups(const uint8_t *codes, i64 rows, i64 k, i64 bits, i64 group, i64 gate_up, const GroupField *fields,
                i64 num_fields, i64 row_bytes, uint8_t *out)
{
    PackJob job = {codes, rows, k, bits, group, gate_up, row_bytes, num_fields, fields, out};
    i64 of_one = gate_up ? rows / 2 : rows, padded = (of_one + PACKED_HALF - 1) / PACKED_HALF * PACKED_HALF;
    if (gate_up) padded *= 2;
    pool_run(pack_panel, &job, (padded + PACKED_PANEL - 1) / PACKED_PANEL);
    return padded;
}
