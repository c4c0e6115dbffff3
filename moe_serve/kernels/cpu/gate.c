/* The gate's choice: scores, groups, the best experts, their weights and the load. Contract: kernels/topk_gate.py. */
#include <math.h>
#include "pool.h"

enum { GATE_ROWS = 16 }; /* rows of a piece */
enum { MOST_EXPERTS = 2048, MOST_GROUPS = 64 };
#define LOWEST_CHOICE -1e30f /* instead of NaN, as in kernels/gate_shape.py */

typedef i64 i8q __attribute__((vector_size(64), aligned(8), may_alias));
typedef i32 i8h __attribute__((vector_size(32), aligned(4), may_alias));

typedef struct { /* _facts in gate.py */
    i64 experts, topk, sigmoid, norm_topk, groups, topk_groups;
    double scaling, norm_eps;
} GateShape;
typedef struct {
    const GateShape *shape;
    const float *bias; /* [experts] or 0 */
    const float *logits;
    i64 rows, step, *ids;
    float *weights;
} GateJob;

/* Fetches 16 floats, of which those from `count` on are `rest`. */
INLINE v16 get_or(const float *x, i64 count, float rest)
{
    if (count >= 16) return *(const v16 *)x;
    float some[16];
    for (int i = 0; i < 16; i++) some[i] = i < count ? x[i] : rest;
    v16 v;
    memcpy(&v, some, 64);
    return v;
}

/* logits -> scores [experts]; both arrays of 16s, filled up with zeros */
static void score_row(const GateShape *g, const float *logits, float *score)
{
    v16 best = (v16){} - INFINITY, total = {};
    if (!g->sigmoid)
        for (i64 e = 0; e < g->experts; e += 16) {
            v16 x = get_or(logits + e, g->experts - e, -INFINITY);
            best = pick16(x > best, x, best);
        }
    float most = max16(best);
    for (i64 e = 0; e < g->experts; e += 16) {
        v16 x = get_or(logits + e, g->experts - e, -INFINITY);
        v16 s;
        if (g->sigmoid) s = 1.0f / (1.0f + exp16(-x));
        else s = pick16(x - most < -87.0f, (v16){}, exp16(x - most));
        *(v16 *)(score + e) = s;
        total += s;
    }
    if (g->sigmoid) return;
    float by = 1 / sum16(total);
    for (i64 e = 0; e < g->experts; e += 16) *(v16 *)(score + e) *= by;
}

/* Returns the sum of the two largest of a group's choices. */
static float best_two(const float *choice, i64 count)
{
    v16 first = (v16){} - INFINITY, second = first;
    for (i64 i = 0; i < count; i += 16) {
        v16 x = get_or(choice + i, count - i, -INFINITY);
        i16x above = x > first;
        v16 lower = pick16(above, first, x);
        first = pick16(above, x, first);
        second = pick16(lower > second, lower, second);
    }
    float one = first[0], two = second[0];
    for (int i = 1; i < 16; i++) {
        float lower = first[i] > one ? one : first[i];
        one = first[i] > one ? first[i] : one;
        two = lower > two ? lower : two;
        two = second[i] > two ? second[i] : two;
    }
    return one + two;
}

/* Sets the choices of all groups but the best to -inf. The first of equal groups is better. */
static void drop_groups(const GateShape *g, float *choice)
{
    float best[MOST_GROUPS];
    i64 size = g->experts / g->groups;
    for (i64 i = 0; i < g->groups; i++) best[i] = best_two(choice + i * size, size);
    for (i64 i = 0; i < g->groups; i++) {
        i64 better = 0;
        for (i64 j = 0; j < g->groups; j++) better += best[j] > best[i] || (best[j] == best[i] && j < i);
        if (better < g->topk_groups) continue;
        for (i64 e = i * size; e < (i + 1) * size; e++) choice[e] = -INFINITY;
    }
}

/* Writes the best experts, best first, the lower id where choices are equal. */
static void choose(const GateShape *g, const float *choice, i64 *ids)
{
    i8q keys[MOST_EXPERTS / 8]; /* order of the float in the upper half, so that integers compare; ~id in the lower */
    i64 vectors = (g->experts + 15) / 16 * 2;
    static const i8q lane = {0, 1, 2, 3, 4, 5, 6, 7};
    for (i64 v = 0; v < vectors; v++) {
        i8h bits;
        memcpy(&bits, choice + 8 * v, 32);
        bits ^= (bits >> 31) & 0x7fffffff;
        keys[v] = (__builtin_convertvector(bits, i8q) << 32) | ((~(lane + 8 * v)) & 0xffffffff);
    }
    for (i64 k = 0; k < g->topk; k++) {
        i8q best = keys[0];
        for (i64 v = 1; v < vectors; v++) {
            i8q above = keys[v] > best;
            best = (keys[v] & above) | (best & ~above);
        }
        i64 most = best[0];
        for (int i = 1; i < 8; i++) most = best[i] > most ? best[i] : most;
        ids[k] = ~most & 0xffffffff;
        ((i64 *)keys)[ids[k]] = INT64_MIN;
    }
}

static void gate_row(const GateShape *g, const float *bias, const float *logits, i64 *ids, float *weights)
{
    float score[MOST_EXPERTS], choice[MOST_EXPERTS], total = 0;
    score_row(g, logits, score);
    for (i64 e = 0; e < g->experts; e += 16) {
        v16 c = *(const v16 *)(score + e);
        if (bias) c += get_or(bias + e, g->experts - e, 0);
        *(v16 *)(choice + e) = pick16(c == c, c + 0.0f, (v16){} + LOWEST_CHOICE); /* + 0: one kind of zero */
    }
    if (g->groups > 1) drop_groups(g, choice);
    for (i64 e = g->experts; e % 16; e++) choice[e] = -INFINITY;
    choose(g, choice, ids);
    for (i64 k = 0; k < g->topk; k++) total += weights[k] = score[ids[k]];
    float by = (float)g->scaling, under = total + (float)g->norm_eps;
    for (i64 k = 0; k < g->topk; k++) weights[k] = (g->norm_topk ? weights[k] / under : weights[k]) * by;
}

static void gate_piece(const void *about, i64 piece)
{
    const GateJob *job = about;
    i64 topk = job->shape->topk;
    for (i64 t = piece * GATE_ROWS; t < least((piece + 1) * GATE_ROWS, job->rows); t++)
        gate_row(job->shape, job->bias, job->logits + t * job->step, job->ids + t * topk, job->weights + t * topk);
}

/* logits [rows, experts] with `step` floats from row to row -> ids and weights [rows, topk]; load [experts] counts */
i64 gate(const GateShape *shape, const float *bias, const float *logits, i64 rows, i64 step, i64 *ids, float *weights,
         i64 *load)
{
    GateJob job = {shape, bias, logits, rows, step, ids, weights};
    pool_run(gate_piece, &job, (rows + GATE_ROWS - 1) / GATE_ROWS);
    for (i64 i = 0; i < rows * shape->topk; i++) load[ids[i]]++;
    return 0;
}
