/* Splits the load of experts over their replicas so that ranks are level: the loops of fractions.py, to the bit, in C.
   Every sum is added in the same order. Compiled without contraction into fused multiply-adds, which would round
   differently. links.c includes this file.
   Shape words: R ranks, K slots per rank, P = R x K, E experts. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

typedef struct { /* laid out as fractions.py writes it */
    i64 num_experts, num_ranks, slots, num_sweeps;
    double least_fall; /* share by which a sweep has to lower the heaviest rank */
} Shape;

typedef struct {
    i64 *count, *start, *place, *order;  /* [E] replicas; the first of them in rank_of; places; heaviest first */
    i64 *rank_of, *replica_at;           /* [P] rank of each replica, by expert; the replica in each slot, or -1 */
    double *own, *total, *rest, *lowest; /* [P] of each replica; [R]; [P], [P] of one expert's */
} Split;

/* Returns whether there is memory for a split. */
static int make_split(const Shape *shape, Split *s) {
    size_t experts = (size_t)shape->num_experts, ranks = (size_t)shape->num_ranks, slots = ranks * (size_t)shape->slots;
    i64 *numbers = malloc((4 * experts + 2 * slots) * sizeof(i64));
    double *reals = malloc((3 * slots + ranks) * sizeof(double));
    *s = (Split){.count = numbers, .start = numbers + experts, .place = numbers + 2 * experts,
                 .order = numbers + 3 * experts, .rank_of = numbers + 4 * experts,
                 .replica_at = numbers + 4 * experts + slots, .own = reals, .rest = reals + slots,
                 .lowest = reals + 2 * slots, .total = reals + 3 * slots};
    return numbers && reals;
}

static void free_split(Split *s) {
    free(s->count);
    free(s->own);
}

/* Lists the replicas of a table [P], where -1 is an empty slot; of several on one rank the first serves. */
static void list_replicas(const Shape *shape, Split *s, const int32_t *table) {
    i64 num_slots = shape->num_ranks * shape->slots, at = 0;
    for (i64 e = 0; e < shape->num_experts; e++) s->count[e] = 0, s->place[e] = -1;
    for (i64 i = 0; i < num_slots; i++) {
        s->replica_at[i] = -1;
        if (table[i] < 0 || s->place[table[i]] == i / shape->slots) continue;
        s->place[table[i]] = i / shape->slots; /* the last rank that holds it */
        s->replica_at[i] = s->count[table[i]]++;
    }
    for (i64 e = 0; e < shape->num_experts; e++) {
        s->start[e] = at;
        at += s->count[e];
    }
    for (i64 i = 0; i < num_slots; i++)
        if (s->replica_at[i] >= 0) {
            s->replica_at[i] += s->start[table[i]];
            s->rank_of[s->replica_at[i]] = i / shape->slots;
        }
}

static double heaviest(const Shape *shape, const Split *s) {
    double top = 0.0;
    for (i64 r = 0; r < shape->num_ranks; r++)
        if (s->total[r] > top) top = s->total[r];
    return top;
}

/* Spreads an expert over its ranks so that all that get some end at one level. */
static void spread(Split *s, i64 first, i64 count, double amount) {
    double filled = amount, level = 0.0;
    for (i64 j = 0; j < count; j++) {
        double rest = s->total[s->rank_of[first + j]] - s->own[first + j];
        i64 at = j;
        for (; at > 0 && s->lowest[at - 1] > rest; at--) s->lowest[at] = s->lowest[at - 1];
        s->lowest[at] = s->rest[j] = rest;
    }
    for (i64 j = 0; j < count; j++) {
        filled += s->lowest[j];
        level = filled / (double)(j + 1);
        if (j + 1 == count || level <= s->lowest[j + 1]) break;
    }
    for (i64 j = 0; j < count; j++) {
        double given = level - s->rest[j];
        if (given < 0.0) given = 0.0;
        s->own[first + j] = given;
        s->total[s->rank_of[first + j]] = s->rest[j] + given;
    }
}

/* Levels the ranks under a load [E]; returns the load of the heaviest one. */
static double level_ranks(const Shape *shape, Split *s, const double *load) {
    memset(s->total, 0, (size_t)shape->num_ranks * sizeof(double));
    i64 number = 0;
    for (i64 e = 0; e < shape->num_experts; e++) {
        i64 count = s->count[e];
        double each = count ? load[e] / (double)count : 0.0;
        for (i64 j = s->start[e]; j < s->start[e] + count; j++) {
            s->own[j] = each;
            s->total[s->rank_of[j]] += each;
        }
        if (count < 2) continue;
        i64 at = number++;
        for (; at > 0 && load[s->order[at - 1]] < load[e]; at--) s->order[at] = s->order[at - 1];
        s->order[at] = e;
    }
    double top = heaviest(shape, s);
    for (i64 sweep = 0; sweep < shape->num_sweeps; sweep++) {
        for (i64 i = 0; i < number; i++) {
            i64 e = s->order[i];
            spread(s, s->start[e], s->count[e], load[e]);
        }
        double before = top;
        top = heaviest(shape, s);
        if (!(top < before * (1.0 - shape->least_fall))) break;
    }
    return top;
}

typedef struct { /* laid out as fractions.py writes it */
    Shape shape;
    i64 num_layers;
    const double *load;    /* [layers][E] */
    const int32_t *tables; /* [layers][P] */
    double *out;           /* [layers][P] load of each slot */
} Layers;

/* Levels the ranks of every layer; returns 0, or -1 without memory. */
i64 level_layers(const Layers *l) {
    Split s;
    i64 num_slots = l->shape.num_ranks * l->shape.slots, done = -1;
    if (make_split(&l->shape, &s)) {
        for (i64 layer = 0; layer < l->num_layers; layer++) {
            list_replicas(&l->shape, &s, l->tables + layer * num_slots);
            level_ranks(&l->shape, &s, l->load + layer * l->shape.num_experts);
            for (i64 i = 0; i < num_slots; i++)
                l->out[layer * num_slots + i] = s.replica_at[i] < 0 ? 0.0 : s.own[s.replica_at[i]];
        }
        done = 0;
    }
    free_split(&s);
    return done;
}
