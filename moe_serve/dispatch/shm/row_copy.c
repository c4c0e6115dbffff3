/* Copies and adds rows for the shared-memory transport, with the same bits as PlainRowCopier in row_copy_plain.py.

   row_copy_native.py builds it at first use for the machine it runs on. All sizes are int64. */

#include "counts.h"
#include "row_add.h"
#include "row_copy.h"
#include "row_store.h"

/* One copy that bypasses the caches: what benchmarks/dispatch.py compares with. */
void stream_copy(uint8_t *to, const uint8_t *from, i64 size)
{
    spread(NULL, 0, &to, 1, from, size);
    _mm_sfence();
}

/* Plans, and writes entries and rows into this rank's slices of the peers' receive buffers; entries for its own slots go
   into its own slice. Rows for ranks of other hosts stay where they are. weights [T, K], or NULL. Returns -1 where an id names no slot. */
i64 send_rows(const i64 *facts, i64 buffer, i64 others, const i64 *ids, i64 num_tokens, i64 topk,
              const uint8_t *data, const float *weights, i64 *block)
{
    i64 num_ranks = facts[NUM_RANKS], slots = facts[SLOTS], row_bytes = facts[ROW_BYTES], rank = facts[RANK];
    i64 num_slots = num_ranks * slots;
    const i64 *table = slice_table(facts, buffer);
    Exchange ex = exchange_at(facts, block, num_tokens, topk);
    int32_t *entries[num_ranks];
    float *entry_weights[num_ranks];
    i64 seen[num_ranks], done[num_ranks], rank_of[num_slots];
    for (i64 r = 0, slot = 0; r < num_ranks; r++) {
        entries[r] = SLICE(table, r, OUT_ENTRIES);
        entry_weights[r] = SLICE(table, r, OUT_WEIGHTS);
        seen[r] = -1;
        ex.num_rows[r] = done[r] = 0;
        for (i64 i = 0; i < slots; i++)
            rank_of[slot++] = r;
    }
    memset(ex.counts, 0, num_slots * sizeof(i64));
    for (i64 pair = 0, token = 0; token < num_tokens; token++)
        for (i64 k = 0; k < topk; k++, pair++) {
            i64 id = ids[pair];
            if (id < 0) {
                ex.nth[pair] = -1;
                continue;
            }
            if (id >= num_slots)
                return -1;
            i64 r = rank_of[id];
            int32_t entry = (int32_t)(id - r * slots);
            ex.nth[pair] = ex.counts[id]++;
            if (seen[r] != token) {
                seen[r] = token;
                entry |= FIRST;
                ex.tokens[r * num_tokens + ex.num_rows[r]++] = token;
            }
            *entries[r]++ = entry;
            if (weights)
                *entry_weights[r]++ = weights[pair];
        }
    for (i64 r = 0; r < num_ranks; r++)
        if (r == rank || TAKES_PART(others, r)) {
            i64 *head = SLICE(table, r, OUT_HEAD);
            memcpy(head, ex.counts + r * slots, slots * sizeof(i64));
            head[slots] = ex.num_rows[r];
        }
    for (i64 token = 0; token < num_tokens; token++)
        for (i64 r = 0; r < num_ranks; r++) {
            if (!TAKES_PART(others & facts[LOCAL], r) || done[r] == ex.num_rows[r] || ex.tokens[r * num_tokens + done[r]] != token)
                continue;
            copy_row((uint8_t *)SLICE(table, r, OUT_ROWS) + done[r]++ * row_bytes, data + token * row_bytes, row_bytes);
        }
    _mm_sfence();
    return 0;
}

/* Reads how many entries each source sent for each slot: arrived, starts, per_slot, rows_of. Returns their number. */
static i64 read_heads(const i64 *facts, const i64 *table, i64 others, Exchange ex)
{
    i64 num_ranks = facts[NUM_RANKS], slots = facts[SLOTS], rank = facts[RANK], sum = 0;
    for (i64 source = 0; source < num_ranks; source++) {
        const i64 *head = SLICE(table, source, IN_HEAD);
        int takes_part = source == rank || TAKES_PART(others, source);
        for (i64 slot = 0; slot < slots; slot++)
            ex.arrived[source * slots + slot] = takes_part ? head[slot] : 0;
        ex.rows_of[source] = takes_part ? head[slots] : 0;
    }
    for (i64 slot = 0; slot < slots; slot++) {
        i64 before = sum;
        for (i64 source = 0; source < num_ranks; source++) {
            ex.starts[source * slots + slot] = sum;
            sum += ex.arrived[source * slots + slot];
        }
        ex.per_slot[slot] = sum - before;
    }
    return sum;
}

/* Returns the row of x where the rows of a source for a slot begin. */
static i64 placed_start(const i64 *facts, Exchange ex, i64 source, i64 slot)
{
    i64 start = ex.starts[source * facts[SLOTS] + slot];
    return facts[SLAB_ROWS] ? slot * facts[SLAB_ROWS] + start - ex.starts[slot] : start;
}

/* Copies a row for each entry to its place in the placed layout. Returns the number of rows, or -1 where a slab is too
   small. pieces [R]: addresses of decoded rows, or NULL where received rows need no decoding; own: this rank's rows */
i64 place_rows(const i64 *facts, i64 buffer, i64 others, i64 num_tokens, i64 topk, const i64 *pieces, const uint8_t *own,
               i64 row_bytes, uint8_t *out, i64 *block)
{
    i64 num_ranks = facts[NUM_RANKS], slots = facts[SLOTS], rank = facts[RANK], at = 0;
    const i64 *table = slice_table(facts, buffer);
    Exchange ex = exchange_at(facts, block, num_tokens, topk);
    i64 total = read_heads(facts, table, others, ex);
    for (i64 slot = 0; facts[SLAB_ROWS] && slot < slots; slot++)
        if (ex.per_slot[slot] > facts[SLAB_ROWS])
            return -1;
    for (i64 source = 0; source < num_ranks; source++) {
        const int32_t *entries = SLICE(table, source, IN_ENTRIES);
        const float *weights = SLICE(table, source, IN_WEIGHTS);
        const uint8_t *piece = pieces ? (const uint8_t *)pieces[source]
                               : source == rank ? own : SLICE(table, source, IN_ROWS);
        i64 next[slots], num_entries = 0;
        for (i64 slot = 0; slot < slots; slot++) {
            next[slot] = placed_start(facts, ex, source, slot);
            num_entries += ex.arrived[source * slots + slot];
        }
        for (i64 entry = 0, row = 0; entry < num_entries; row++) {
            uint8_t *to[facts[MAX_TOPK] + 1];
            i64 num = 0;
            do {
                i64 slot = entries[entry] & (FIRST - 1), placed = next[slot]++;
                if (facts[RANK_SUM]) {
                    ex.placed[at] = entries[entry] & FIRST ? placed | FIRST : placed;
                    ex.weight[at++] = weights[entry];
                }
                to[num++] = out + placed * row_bytes;
                entry++;
            } while (entry < num_entries && !(entries[entry] & FIRST));
            i64 from = source == rank ? ex.tokens[rank * num_tokens + row] : row;
            spread_row(to, num, piece + from * row_bytes, row_bytes, out, facts[CACHED_BYTES]);
        }
    }
    _mm_sfence();
    return total;
}

/* Copies results to the send buffer, unless they are there, and tells each source rank where its own begin. */
void send_results(const i64 *facts, i64 buffer, i64 others, i64 num_tokens, i64 topk, i64 in_place,
                  const uint8_t *data, i64 *block)
{
    i64 num_ranks = facts[NUM_RANKS], slots = facts[SLOTS], row_bytes = facts[RESULT_ROW_BYTES], first_row = 0;
    const i64 *table = slice_table(facts, buffer);
    Exchange ex = exchange_at(facts, block, num_tokens, topk);
    uint8_t *send_buffer = SLICE(table, facts[RANK], SEND_BUFFER);
    for (i64 peer = 0; peer < num_ranks; first_row += ex.rows_of[peer++]) {
        if (!TAKES_PART(others, peer))
            continue;
        i64 *starts = SLICE(table, peer, OUT_STARTS);
        memcpy(starts, ex.starts + peer * slots, slots * sizeof(i64));
        if (facts[RANK_SUM])
            starts[0] = first_row;
        for (i64 slot = 0; slot < slots && !in_place; slot++)
            if (ex.arrived[peer * slots + slot]) /* without rows there may be no address either */
                copy_row(send_buffer + ex.starts[peer * slots + slot] * row_bytes,
                         data + placed_start(facts, ex, peer, slot) * row_bytes,
                         ex.arrived[peer * slots + slot] * row_bytes);
    }
    _mm_sfence();
}

/* Adds rows [T, K] int64 of `from` [.., hidden], -1 = nothing to add; compared with the reference at load. */
void weighted_rows(const i64 *facts, const i64 *rows, const float *weights, i64 num_tokens, i64 topk,
                   const uint8_t *from, uint8_t *out)
{
    i64 row_bytes = facts[HIDDEN] * (facts[IS_BF16] ? 2 : 4);
    const void *at[topk + 1];
    float scale[topk + 1];
    for (i64 token = 0; token < num_tokens; token++) {
        i64 num = 0;
        for (i64 pair = token * topk; pair < (token + 1) * topk; pair++)
            if (rows[pair] >= 0) {
                at[num] = from + rows[pair] * row_bytes;
                scale[num++] = weights[pair];
            }
        add_rows(facts, at, scale, num, out + token * row_bytes);
    }
}

/* rank_sum, on the experts' rank: the weighted sum of each arrived row's results, by source, then row. */
void sum_results(const i64 *facts, i64 num_tokens, i64 topk, const uint8_t *data, uint8_t *out, i64 *block)
{
    i64 row_bytes = facts[HIDDEN] * (facts[IS_BF16] ? 2 : 4), num_entries = 0;
    Exchange ex = exchange_at(facts, block, num_tokens, topk);
    for (i64 i = 0; i < facts[NUM_RANKS] * facts[SLOTS]; i++)
        num_entries += ex.arrived[i];
    for (i64 entry = 0; entry < num_entries; out += row_bytes) {
        const void *rows[facts[MAX_TOPK] + 1];
        i64 first = entry;
        do {
            rows[entry - first] = data + (ex.placed[entry] & ~(i64)FIRST) * row_bytes;
            entry++;
        } while (entry < num_entries && !(ex.placed[entry] & FIRST));
        add_rows(facts, rows, ex.weight + first, entry - first, out);
    }
}

/* Adds each token's results: own ones from `own`, in the placed layout, the others from the peers' send buffers. */
void add_results(const i64 *facts, i64 buffer, i64 others, const i64 *ids, i64 num_tokens, i64 topk,
                 const uint8_t *own, const float *weights, uint8_t *out, i64 *block)
{
    i64 num_ranks = facts[NUM_RANKS], slots = facts[SLOTS], rank = facts[RANK], most = topk > num_ranks ? topk : num_ranks;
    i64 row_bytes = facts[HIDDEN] * (facts[IS_BF16] ? 2 : 4), own_first = 0;
    const i64 *table = slice_table(facts, buffer);
    Exchange ex = exchange_at(facts, block, num_tokens, topk);
    const uint8_t *first[num_ranks * slots]; /* of each slot, where this rank's results begin */
    i64 next[num_ranks];
    const void *rows[most + 1];
    float scale[most + 1];
    for (i64 source = 0; source < rank; source++)
        own_first += ex.rows_of[source];
    for (i64 source = 0; source < num_ranks; source++) {
        next[source] = 0;
        if (source != rank && !TAKES_PART(others, source))
            continue; /* nothing was sent there, and nothing is read */
        const i64 *starts = SLICE(table, source, IN_STARTS);
        const uint8_t *from = SLICE(table, source, SEND_BUFFER);
        if (facts[RANK_SUM])
            first[source] = from + (source == rank ? own_first : starts[0]) * row_bytes;
        else
            for (i64 slot = 0; slot < slots; slot++)
                first[source * slots + slot] = source == rank ? own + placed_start(facts, ex, rank, slot) * row_bytes
                                                              : from + starts[slot] * row_bytes;
    }
    for (i64 token = 0; token < num_tokens; token++) {
        i64 num = 0;
        if (facts[RANK_SUM]) {
            for (i64 source = 0; source < num_ranks; source++)
                if (next[source] < ex.num_rows[source] &&
                    ex.tokens[source * num_tokens + next[source]] == token) {
                    rows[num] = first[source] + next[source]++ * row_bytes;
                    scale[num++] = 1;
                }
        } else {
            for (i64 pair = token * topk; pair < (token + 1) * topk; pair++)
                if (ex.nth[pair] >= 0) {
                    rows[num] = first[ids[pair]] + ex.nth[pair] * row_bytes;
                    scale[num++] = weights[pair];
                }
        }
        add_rows(facts, rows, scale, num, out + token * row_bytes);
    }
}
#include "fused.h" /* over the functions above */
