/* The gate's choice: scores, groups, the best experts, their weights and the load. Contract: kernels/topk_gate.py. */
#include <math.h>
#include "pool.h"
#include "sequences.h"

enum { GATE_ROWS = 16, TOGETHER = 4 }; /* rows of a piece; rows whose choices are made at once */
enum { MOST_EXPERTS = 2048, MOST_GROUPS = 64 };
#define LOWEST_CHOICE -1e30f /* instead of NaN, as in kernels/forms.py */

typedef i64 i8q __attribute__((vector_size(64), aligned(8), may_alias));
typedef i32 i8h __attribute__((vector_size(32), aligned(4), may_alias));

enum { SOFTMAX, SIGMOID, SIGMOID_OF_CHOSEN, SPARSEMIXER, SQRT_SOFTPLUS }; /* Scoring of kernels/forms.py */
typedef struct { /* _gate_facts in operations.py */
    i64 experts, topk, scoring, norm_topk, groups, topk_groups, by_best, counted;
    double scaling, norm_eps, norm_min, far, masked;
} GateShape;
typedef struct {
    const GateShape *shape;
    const float *bias; /* [experts] or 0 */
    const float *logits;
    i64 rows, step, *ids;
    float *weights;
    const i64 *token_ids, *chosen; /* [rows], and [tokens, topk]: the experts of each token; or 0 */
} GateJob;

/* As get, but `rest` behind the first `count` floats. */
INLINE vf get_or(const float *x, int j, i64 count, float rest)
{
    vf v;
    if (count >= (j + 1) * VL) return *(const vf *)(x + j * VL);
    for (int lane = 0; lane < VL; lane++) v[lane] = j * VL + lane < count ? x[j * VL + lane] : rest;
    return v;
}

/* Accurate however small it is, since weights are divided by their sum: below -18, log(1 + e) is e by the last bits of
   both, while 1 + e would lose it. */
INLINE float root_softplus(float x) { return sqrtf(x < -18 ? exp_vf(splat(x))[0] : softplus(x)); }

/* logits -> scores [experts]; both arrays of 16s, filled up with zeros. Sparsemixer's are the logits. */
static void score_row(const GateShape *g, const float *logits, float *score)
{
    vf best = splat(-INFINITY), total[SPAN] = {};
    i64 experts = g->experts;
    int sigmoid = g->scoring == SIGMOID || g->scoring == SIGMOID_OF_CHOSEN;
    if (g->scoring == SPARSEMIXER) {
        BY_REGISTER(experts, put(score + i, j, get_or(logits + i, j, count, -INFINITY), 16);)
        return;
    }
    if (g->scoring == SQRT_SOFTPLUS) {
        for (i64 e = 0; e < experts; e++) score[e] = root_softplus(logits[e]);
        for (i64 e = experts; e % 16; e++) score[e] = 0;
        return;
    }
    if (!sigmoid)
        BY_REGISTER(experts, vf x = get_or(logits + i, j, count, -INFINITY); best = pick(x > best, x, best);)
    float most = highest(best);
    if (sigmoid) {
        BY_REGISTER(experts, vf x = get_or(logits + i, j, count, -INFINITY);
                    put(score + i, j, 1.0f / (1.0f + exp_vf(-x)), 16);)
        return;
    }
    BY_REGISTER(experts, vf x = get_or(logits + i, j, count, -INFINITY) - most;
                vf s = pick(x < -87.0f, (vf){}, exp_vf(x)); put(score + i, j, s, 16); total[j] += s;)
    float by = 1 / sum16(total);
    for (i64 e = 0; e < experts; e += VL) *(vf *)(score + e) *= by;
}

/* Returns the sum of the two largest of a group's choices, or the largest. */
static float best_two(const float *choice, i64 count, i64 only_best)
{
    vf first = splat(-INFINITY), second = first;
    for (i64 i = 0; i < count; i += VL) {
        vf x = get_or(choice + i, 0, count - i, -INFINITY);
        vi above = x > first;
        vf lower = pick(above, first, x);
        first = pick(above, x, first);
        second = pick(lower > second, lower, second);
    }
    float one = first[0], two = second[0];
    for (int i = 1; i < VL; i++) {
        float lower = first[i] > one ? one : first[i];
        one = first[i] > one ? first[i] : one;
        two = lower > two ? lower : two;
        two = second[i] > two ? second[i] : two;
    }
    return only_best ? one : one + two;
}

/* Sets the choices of all groups but the best to what masks them. The first of equal groups is better. */
static void drop_groups(const GateShape *g, float *choice)
{
    float best[MOST_GROUPS];
    i64 size = g->experts / g->groups;
    for (i64 i = 0; i < g->groups; i++) best[i] = best_two(choice + i * size, size, g->by_best);
    for (i64 i = 0; i < g->groups; i++) {
        i64 better = 0;
        for (i64 j = 0; j < g->groups; j++) better += best[j] > best[i] || (best[j] == best[i] && j < i);
        if (better < g->topk_groups) continue;
        for (i64 e = i * size; e < (i + 1) * size; e++) choice[e] = (float)g->masked;
    }
}

/* A tournament of one row: the key of expert e meets those of e + first, e + 2 first, .. in the first round, and the
   winners meet likewise in the second. A key is the order of its float in the upper half, ~e in the lower one, so that
   integers compare, and the lower expert wins where choices are equal. */
typedef struct {
    i64 keys[MOST_EXPERTS], winners[MOST_EXPERTS / 8], finals[MOST_EXPERTS / 64];
} Tournament;

INLINE i64 most(i64 a, i64 b) { return a > b ? a : b; }
INLINE i64 winner(const i64 *key, i64 step)
{
    i64 left = most(most(key[0], key[step]), most(key[2 * step], key[3 * step]));
    return most(left, most(most(key[4 * step], key[5 * step]), most(key[6 * step], key[7 * step])));
}

/* choice: filled up with -inf to a multiple of 16; finals: a power of two */
static void begin(const float *choice, i64 experts, i64 finals, Tournament *t)
{
    static const i8q lane = {0, 1, 2, 3, 4, 5, 6, 7};
    for (i64 e = 0; e < finals * 64; e += 8) {
        i8q keys = (i8q){} + INT64_MIN;
        if (e < experts) {
            i8h order;
            memcpy(&order, choice + e, 32);
            order ^= (order >> 31) & 0x7fffffff;
            keys = (__builtin_convertvector(order, i8q) << 32) | (~(lane + e) & 0xffffffff);
        }
        memcpy(t->keys + e, &keys, 64);
    }
    for (i64 i = 0; i < finals * 8; i++) t->winners[i] = winner(t->keys + i, finals * 8);
    for (i64 i = 0; i < finals; i++) t->finals[i] = winner(t->winners + i, finals);
}

/* Returns the best expert, which then takes no more part. */
INLINE i64 take_best(Tournament *t, i64 finals)
{
    i64 best = t->finals[0];
    for (i64 i = 1; i < finals; i++) best = most(best, t->finals[i]);
    i64 expert = ~best & 0xffffffff, first = expert & (finals * 8 - 1), second = first & (finals - 1);
    t->keys[expert] = INT64_MIN;
    t->winners[first] = winner(t->keys + first, finals * 8);
    t->finals[second] = winner(t->winners + second, finals);
    return expert;
}

/* The scores of one row and the choice made from them; arrays filled up to a multiple of 16, the choice with -inf. */
static void choices(const GateShape *g, const float *bias, const float *logits, float *score, float *choice)
{
    score_row(g, logits, score);
    const float *from = g->scoring == SIGMOID_OF_CHOSEN ? logits : score;
    BY_REGISTER(g->experts, vf c = get_or(from + i, j, count, -INFINITY);
                if (bias) c += get(bias + i, j, count);
                put(choice + i, j, pick(c == c, c + 0.0f, splat(LOWEST_CHOICE)), 16);) /* + 0: one kind of zero */
    if (g->groups > 1) drop_groups(g, choice);
    for (i64 e = g->experts; e % 16; e++) choice[e] = -INFINITY;
}

/* What sparsemixer weighs a row's k-th choice with: 1 / sum of exp(logit - best) of those not far below the best. */
static float sparse_weight(const GateShape *g, const float *logits, const i64 *ids, i64 k)
{
    float best = logits[ids[k]], far = (float)g->far;
    vf total[SPAN] = {};
    for (i64 e = 0; e < g->experts; e += 16)
        UNROLL for (int j = 0; j < SPAN; j++) {
            vf x = *(const vf *)(logits + e + j * VL), size = pick(x < 0, -x, x);
            vf under = pick(size > best, size, splat(best)), s = pick(x - best < -87.0f, (vf){}, exp_vf(x - best));
            s = pick((best - x) / under > far, (vf){}, s);
            if (k && ids[0] / VL == e / VL + j) s[ids[0] % VL] = 0;
            total[j] += s;
        }
    return 1 / sum16(total);
}

static void weigh_choice(const GateShape *g, const float *score, const i64 *ids, float *weights)
{
    float total = 0, by = (float)g->scaling;
    for (i64 k = 0; k < g->topk; k++)
        total += weights[k] = g->scoring == SPARSEMIXER ? sparse_weight(g, score, ids, k) : score[ids[k]];
    float under = g->norm_topk ? total + (float)g->norm_eps : 1, least_under = (float)g->norm_min;
    if (g->norm_topk && under < least_under) under = least_under;
    for (i64 k = 0; k < g->topk; k++) weights[k] = weights[k] / under * by;
}

/* Several rows at once, since each round of a row's tournament waits for the one before. */
static void gate_piece(const void *about, i64 piece)
{
    const GateJob *job = about;
    const GateShape *g = job->shape;
    float score[TOGETHER][MOST_EXPERTS], choice[MOST_EXPERTS];
    Tournament tournament[TOGETHER];
    i64 finals = 1, end = least((piece + 1) * GATE_ROWS, job->rows);
    while (finals * 64 < g->experts) finals *= 2;
    for (i64 first = piece * GATE_ROWS; first < end; first += TOGETHER) {
        i64 rows = least(TOGETHER, end - first), *ids = job->ids + first * g->topk;
        const float *logits = job->logits + first * job->step;
        if (job->chosen)
            for (i64 r = 0; r < rows; r++) {
                score_row(g, logits + r * job->step, score[r]);
                const i64 *of_token = job->chosen + job->token_ids[first + r] * g->topk;
                memcpy(ids + r * g->topk, of_token, g->topk * sizeof *ids);
            }
        else {
            for (i64 r = 0; r < rows; r++) {
                choices(g, job->bias, logits + r * job->step, score[r], choice);
                begin(choice, g->experts, finals, tournament + r);
            }
            for (i64 k = 0; k < g->topk; k++)
                for (i64 r = 0; r < rows; r++) ids[r * g->topk + k] = take_best(tournament + r, finals);
        }
        for (i64 r = 0; r < rows; r++)
            weigh_choice(g, score[r], ids + r * g->topk, job->weights + (first + r) * g->topk);
    }
}

/* logits [rows, experts] with `step` floats from row to row -> ids and weights [rows, topk]; load [counted] counts the
   first ones. chosen [tokens, topk]: the experts of each token, by token_ids [rows]; 0: the gate chooses */
i64 gate(const GateShape *shape, const float *bias, const float *logits, i64 rows, i64 step, i64 *ids, float *weights,
         i64 *load, const i64 *token_ids, const i64 *chosen)
{
    GateJob job = {shape, bias, logits, rows, step, ids, weights, token_ids, chosen};
    pool_run(gate_piece, &job, (rows + GATE_ROWS - 1) / GATE_ROWS);
    for (i64 i = 0; i < rows * shape->topk; i++)
        if (ids[i] < shape->counted) load[ids[i]]++;
    return 0;
}

/* Choices from `experts` on leave ids [rows, topk], where they become -1; total [rows] gets the sum of their weights. */
i64 take_identity(i64 *ids, const float *weights, i64 rows, i64 topk, i64 experts, float *total)
{
    for (i64 i = 0; i < rows; i++, ids += topk, weights += topk) {
        total[i] = 0;
        for (i64 k = 0; k < topk; k++)
            if (ids[k] >= experts) {
                total[i] += weights[k];
                ids[k] = -1;
            }
    }
    return 0;
}
