/* Facts, addresses and the bookkeeping of one dispatch. Shape words as in send_plan.py. */

#pragma once
#include <stdint.h>

typedef int64_t i64;

/* Facts that never change, as made by buffer_facts. A slice table for each buffer follows: for each rank, SLICE_WORDS
   addresses. */
enum { RANK, NUM_RANKS, SLOTS, ROW_BYTES, RESULT_ROW_BYTES, HIDDEN, IS_BF16, CACHED_BYTES, SLAB_ROWS, RANK_SUM,
       MAX_TOPK, MAX_RESULTS, LOCAL, FACTS }; /* LOCAL: ranks of this host, as bits */
enum { OUT_HEAD, OUT_ENTRIES, OUT_WEIGHTS, OUT_ROWS, OUT_STARTS,
       IN_HEAD, IN_ENTRIES, IN_WEIGHTS, IN_ROWS, IN_STARTS, SEND_BUFFER, SLICE_WORDS };
#define SLICE(table, rank, field) ((void *)(table)[(rank) * SLICE_WORDS + (field)])
#define TAKES_PART(others, rank) (((others) >> (rank)) & 1)
enum { FIRST = 1 << 30 }; /* in an entry: a new row begins */

static const i64 *slice_table(const i64 *facts, i64 buffer)
{
    return facts + FACTS + buffer * facts[NUM_RANKS] * SLICE_WORDS;
}

/* What is known of one dispatch until its results are added, in one block of words. */
typedef struct {
    /* of what arrived here: */
    i64 *per_slot; /* [S] */
    i64 *rows_of;  /* [R]        rows of each source */
    i64 *arrived;  /* [R, S]     entries of each source for each slot */
    i64 *starts;   /* [R, S]     where they begin in the packed order */
    /* of what this rank sent: */
    i64 *counts;   /* [P]        entries for each slot */
    i64 *num_rows; /* [R]        rows for each rank */
    i64 *tokens;   /* [R, T]     which */
    i64 *nth;      /* [T, K]     for the i-th entry of this rank for its slot i, -1 = not sent */
    /* with rank_sum, of each entry that arrived, by source, then row: */
    i64 *placed;   /* [M]        row of x, + FIRST where a row begins */
    float *weight; /* [M] */
} Exchange;

static Exchange exchange_at(const i64 *facts, i64 *block, i64 num_tokens, i64 topk)
{
    i64 num_ranks = facts[NUM_RANKS], slots = facts[SLOTS];
    Exchange ex;
    ex.per_slot = block;
    ex.rows_of = ex.per_slot + slots;
    ex.arrived = ex.rows_of + num_ranks;
    ex.starts = ex.arrived + num_ranks * slots;
    ex.counts = ex.starts + num_ranks * slots;
    ex.num_rows = ex.counts + num_ranks * slots;
    ex.tokens = ex.num_rows + num_ranks;
    ex.nth = ex.tokens + num_ranks * num_tokens;
    ex.placed = ex.nth + num_tokens * topk;
    ex.weight = (float *)(ex.placed + facts[MAX_RESULTS]);
    return ex;
}
