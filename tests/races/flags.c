/* Ranks that are threads carry rows and counts through memory, by the flags of the shared-memory transport, for
   test_races.py. What Python does there, numbering calls and acknowledging results, is done as channel.py does it.
   Returns 0 where every row and every sum is right. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "row_copy.c"
#include "fused.h"

enum { RANKS = 3, TOKENS = 5, TOPK = 2, WIDTH = 40, CALLS = 400, ROW = WIDTH * (i64)sizeof(float) };
enum { FLAG_ROW = 16, COUNTS_COLUMN = 0, COUNTS_READ_COLUMN = 6, RESULTS_READ_COLUMN = 8 };

typedef struct { /* what one source writes for one rank; one slot for each rank */
    i64 flags[FLAG_ROW];
    struct {
        i64 counts[RANKS], head[2], starts[1];
        int32_t entries[TOKENS * TOPK];
        float weights[TOKENS * TOPK], rows[TOKENS * WIDTH];
    } buffers[2];
} Slice;

static Slice slices[RANKS][RANKS]; /* by rank, then source */
static float results[RANKS][2][RANKS * TOKENS * TOPK * WIDTH];
static int wrong;

static i64 multiply(i64 experts, i64 x, i64 x_row, i64 rows_per_slot, i64 slab_rows, i64 middle, i64 y, i64 y_row)
{
    (void)slab_rows, (void)middle;
    for (i64 i = 0; i < *(i64 *)rows_per_slot; i++)
        for (i64 j = 0; j < WIDTH; j++)
            ((float *)y)[i * y_row + j] = ((float *)x)[i * x_row + j] * (float)(experts + 1);
    return 0;
}

static i64 no_clock(i64 clock, i64 part) { return clock + part; }

static float row_of(i64 rank, i64 call, i64 token) { return (float)(call * 64 + rank * 16 + token); }

static void *run(void *number)
{
    i64 rank = (i64)number, others = ((1 << RANKS) - 1) & ~(1 << rank), last = 0;
    i64 waited[RANKS] = {0}, block[256], counted[2 + 2 * RANKS * COUNT_WORDS] = {rank, RANKS};
    i64 facts[FACTS + 2 * RANKS * SLICE_WORDS] = {rank, RANKS, 1, ROW, ROW, WIDTH, 0, 1 << 12, 0, 0, TOPK,
                                                  RANKS * TOKENS * TOPK, -1};
    float *staging = malloc(RANKS * TOKENS * TOPK * ROW), x[TOKENS * WIDTH], out[TOKENS * WIDTH];
    Waits waits = {.rank = rank, .num_ranks = RANKS, .looks = 20, .waited_ns = waited};
    Fused *t = malloc(sizeof(Fused) + 4 * RANKS * FLAG_WORDS * sizeof(i64));
    *t = (Fused){.others = others, .facts = facts, .block = block, .staging = (uint8_t *)staging,
                 .expert_ffn = multiply, .waits = &waits, .turn_part = no_clock};
    for (i64 buffer = 0; buffer < 2; buffer++)
        for (i64 peer = 0; peer < RANKS; peer++) {
            Slice *to = &slices[peer][rank], *from = &slices[rank][peer];
            i64 addresses[] = {(i64)to->buffers[buffer].head, (i64)to->buffers[buffer].entries,
                               (i64)to->buffers[buffer].weights, (i64)to->buffers[buffer].rows,
                               (i64)to->buffers[buffer].starts, (i64)from->buffers[buffer].head,
                               (i64)from->buffers[buffer].entries, (i64)from->buffers[buffer].weights,
                               (i64)from->buffers[buffer].rows, (i64)from->buffers[buffer].starts,
                               (i64)results[peer][buffer]};
            memcpy(facts + FACTS + (buffer * RANKS + peer) * SLICE_WORDS, addresses, sizeof addresses);
            i64 of_counts[] = {(i64)to->buffers[buffer].counts, (i64)(to->flags + COUNTS_COLUMN + buffer),
                               (i64)(to->flags + COUNTS_READ_COLUMN), (i64)from->buffers[buffer].counts,
                               (i64)(from->flags + COUNTS_COLUMN + buffer), (i64)(from->flags + COUNTS_READ_COLUMN)};
            memcpy(counted + 2 + (buffer * RANKS + peer) * COUNT_WORDS, of_counts, sizeof of_counts);
            for (i64 there = 0; there < 2; there++) {
                i64 *flags = there ? to->flags : from->flags;
                i64 *at = t->here + ((there * 2 + buffer) * RANKS + peer) * FLAG_WORDS;
                at[DATA_ROWS] = (i64)(flags + ROWS_COLUMN + buffer), at[READ_ROWS] = (i64)(flags + ROWS_READ_COLUMN);
                at[DATA_RESULTS] = (i64)(flags + RESULTS_COLUMN + buffer);
                at[READ_RESULTS] = (i64)(flags + RESULTS_READ_COLUMN);
            }
        }
    for (i64 call = 1; call <= CALLS; call++) {
        i64 ids[TOKENS * TOPK], tokens = (call + rank) % (TOKENS + 1), all[RANKS * RANKS], counts[RANKS];
        i64 before = call > 2 ? call - 2 : 0;
        float weights[TOKENS * TOPK];
        for (i64 i = 0; i < tokens * TOPK; i++)
            ids[i] = (call + i) % (RANKS + 1) - 1, weights[i] = 1;
        for (i64 i = 0; i < tokens * WIDTH; i++)
            x[i] = row_of(rank, call, i / WIDTH);
        for (i64 peer = 0; peer < RANKS; peer++)
            counts[peer] = call * 10 + rank;
        while (send_counts(counted, call % 2, others, before, call, counts, RANKS, all) < 0)
            sched_yield();
        while (receive_counts(counted, call % 2, others, call, RANKS, all, 20) < 0)
            sched_yield();
        for (i64 i = 0; i < RANKS * RANKS; i++)
            __atomic_fetch_or(&wrong, all[i] != call * 10 + i / RANKS, __ATOMIC_RELAXED);
        t->rows_flag = t->results_flag = call, t->rows_before = t->results_before = before, t->stage = SEND_ROWS;
        while ((last = fused(t, (uint8_t *)x, ids, weights, tokens, TOPK, rank, 0, (uint8_t *)out)) != HOME)
            if (last < 0)
                return (void *)1;
        for (i64 token = 0; token < tokens; token++) {
            float expected = 0;
            for (i64 k = 0; k < TOPK; k++)
                expected += ids[token * TOPK + k] < 0 ? 0 : row_of(rank, call, token) * (float)(ids[token * TOPK + k] + 1);
            for (i64 j = 0; j < WIDTH; j++)
                __atomic_fetch_or(&wrong, out[token * WIDTH + j] != expected, __ATOMIC_RELAXED);
        }
        raise_flags(t, READ_RESULTS, call % 2, call);
    }
    free(t), free(staging);
    return 0;
}

int main(void)
{
    pthread_t ranks[RANKS];
    void *failed = 0;
    for (i64 rank = 0; rank < RANKS; rank++) pthread_create(&ranks[rank], 0, run, (void *)rank);
    for (i64 rank = 0; rank < RANKS; rank++) {
        pthread_join(ranks[rank], &failed);
        __atomic_fetch_or(&wrong, failed != 0, __ATOMIC_RELAXED);
    }
    if (wrong) puts("a row is wrong");
    return wrong;
}
