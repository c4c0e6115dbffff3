/* What exceeds the capacity of an expert: dropped, or moved to another one. Contract: kernels/capacity.py. */
#include <stdlib.h>
#include "pool.h"

typedef struct {
    double factor;
    i64 moves, is_first;
    unsigned char *kept; /* 2 bytes for each slot of the cache, `stride` bytes apart; 0: nowhere */
    i64 stride, *totals;
} Capacity;
typedef struct {
    float weight;
    i32 entry;
} Rival; /* for the rows of one expert */

static int better(const void *one, const void *other)
{
    const Rival *a = one, *b = other;
    if (a->weight != b->weight) return a->weight > b->weight ? -1 : 1;
    return a->entry < b->entry ? -1 : 1;
}

/* The choices of a row that are over, ids[k] <= -2 for expert -2 - ids[k], move or become -1. Returns how many moved. */
static i64 move_choices(const GateShape *g, const float *bias, const float *logits, i64 *ids, float *weights, i64 most,
                        i64 *counts)
{
    float score[MOST_EXPERTS], choice[MOST_EXPERTS];
    i64 moved = 0;
    choices(g, bias, logits, score, choice);
    for (i64 k = 0; k < g->topk; k++)
        if (ids[k] != -1) choice[ids[k] < 0 ? -2 - ids[k] : ids[k]] = -INFINITY;
    for (i64 k = 0; k < g->topk; k++) {
        if (ids[k] > -2) continue;
        i64 best = -1, old = -2 - ids[k];
        float highest = -INFINITY;
        for (i64 e = 0; e < g->experts; e++)
            if (choice[e] > highest && counts[e] < most) best = e, highest = choice[e];
        ids[k] = best;
        weights[k] = best >= 0 && score[old] > 0 ? weights[k] * (score[best] / score[old]) : 0;
        if (best < 0) continue;
        choice[best] = -INFINITY, counts[best]++, moved++;
    }
    return moved;
}

/* ids, weights [rows, topk] of the gate change in place. slots [rows]: of the cache, where each row's number of changed
   choices is kept, below 0: nowhere; totals [2] grow by the choices that moved and that were dropped; rivals
   [rows, topk]: scratch */
i64 limit_experts(const GateShape *shape, const float *bias, const float *logits, i64 rows, i64 step, i64 *ids,
                  float *weights, const Capacity *capacity, const i64 *slots, Rival *rivals)
{
    i64 counts[MOST_EXPERTS], next[MOST_EXPERTS], experts = shape->experts, topk = shape->topk, any_over = 0, start = 0;
    double mean = capacity->factor * (double)(rows * topk) / (double)experts;
    i64 most = (i64)mean + (mean > (double)(i64)mean);
    if (most < 1) most = 1;
    memset(counts, 0, experts * sizeof(i64));
    for (i64 i = 0; i < rows * topk; i++)
        if (ids[i] >= 0) counts[ids[i]]++;
    for (i64 e = 0; e < experts; e++) {
        next[e] = start;
        if (counts[e] > most) start += counts[e], any_over = 1;
    }
    if (any_over) {
        for (i64 i = 0; i < rows * topk; i++)
            if (ids[i] >= 0 && counts[ids[i]] > most)
                rivals[next[ids[i]]++] = (Rival){weights[i] == weights[i] ? weights[i] : -INFINITY, (i32)i};
        for (i64 e = 0; e < experts; e++) {
            if (counts[e] <= most) continue;
            Rival *mine = rivals + next[e] - counts[e];
            qsort(mine, counts[e], sizeof(Rival), better);
            for (i64 i = most; i < counts[e]; i++) ids[mine[i].entry] = -2 - e;
            counts[e] = most;
        }
    }
    for (i64 t = 0; t < rows; t++) {
        i64 over = 0, moved = 0, *of_row = ids + t * topk;
        float *weight = weights + t * topk;
        for (i64 k = 0; any_over && k < topk; k++) over += of_row[k] < -1;
        if (over && capacity->moves) moved = move_choices(shape, bias, logits + t * step, of_row, weight, most, counts);
        for (i64 k = 0; over && k < topk; k++)
            if (of_row[k] < -1) of_row[k] = -1, weight[k] = 0;
        capacity->totals[0] += moved, capacity->totals[1] += over - moved;
        if (!capacity->kept || slots[t] < 0) continue;
        uint16_t *kept = (uint16_t *)(capacity->kept + slots[t] * capacity->stride);
        *kept = (uint16_t)(over + (capacity->is_first ? 0 : *kept));
    }
    return 0;
}
