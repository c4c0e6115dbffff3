/* The search of pairs.py in C: the same proposals, sums in the same order and ties, so the same result to the bit
   (built without contraction of a * b + c). See there for the method.
   Shape words: R ranks, E experts; expert E is an empty slot. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LARGE_CHANGE 1e6 /* of the sum of whole ranks' peaks, after which it is added up anew */

typedef int64_t i64;
typedef uint64_t u64;

typedef struct { /* laid out as pairs.py writes it */
    i64 num_ranks, num_experts, max_broken, all_broken, num_blocks, steps_per_block, seed;
    const i64 *table;           /* [R, 2] */
    const i64 *start;           /* [E + 1]: values[start[e] + c] is the size of each of c replicas */
    const i64 *least, *most;    /* [E] of c */
    const double *values;       /* the last one is that of an empty slot */
    const double *temperatures; /* [num_blocks] */
    const double *thresholds;   /* [4096] */
    const double *price;        /* [1] of a broken rank */
    i64 *broken, *pool;         /* out: [R], [2 R] */
    i64 *numbers;               /* scratch [8 R + 3 (E + 1)] */
    double *reals;              /* scratch [4 R + E + 1] */
} Task;

typedef struct { /* `number` replicas are put into the pool before index `at`, or, where expert is -1, left out from there */
    i64 at, number, expert;
    double value;
} Cut;

typedef struct {
    const Task *t;
    i64 num_broken, num_pooled;
    i64 *order, *place_of;      /* [R]: broken ranks first; [R]: where in it a rank stands */
    i64 *count, *pooled;        /* [E + 1]: replicas; those in the pool */
    i64 *holder_start, *holders; /* [E + 1], [<= 2 R]: ranks that hold an expert in the table */
    i64 *experts, *new_experts; /* [2 R]: the pool, heaviest first */
    double *sizes, *new_sizes;  /* [2 R] */
    double *value;              /* [E + 1] of one replica now */
    i64 num_cuts;
    Cut cuts[5];                /* of the pool, for the proposal at hand */
} Search;

static u64 draw(u64 *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}
static i64 below(u64 random, i64 n) { return (i64)(((random >> 32) * (u64)n) >> 32); }

static double peak(const Search *s, i64 rank) {
    return s->value[s->t->table[2 * rank]] * s->value[s->t->table[2 * rank + 1]];
}
static i64 partner(const Search *s, i64 rank, i64 expert) {
    const i64 *pair = s->t->table + 2 * rank;
    return pair[0] == expert ? pair[1] : pair[0];
}

/* Returns where the replicas of an expert begin in the pool: all are beside each other, others may have their size. */
static i64 begin_of(const Search *s, i64 expert) {
    double value = s->value[expert];
    i64 low = 0, high = s->num_pooled;
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (s->sizes[middle] > value) low = middle + 1;
        else high = middle;
    }
    while (s->experts[low] != expert) low++;
    return low;
}
static i64 end_of_larger_or_equal(const Search *s, double value) {
    i64 low = 0, high = s->num_pooled;
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (s->sizes[middle] >= value) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void leave_out(Search *s, i64 expert, i64 number) {
    if (number > 0) s->cuts[s->num_cuts++] = (Cut){begin_of(s, expert), number, -1, 0};
}
/* others: replicas of the expert that stay in the pool, beside which these go */
static void put_in(Search *s, i64 expert, i64 number, double value, i64 others) {
    i64 at = others > 0 ? begin_of(s, expert) : end_of_larger_or_equal(s, value);
    if (number > 0) s->cuts[s->num_cuts++] = (Cut){at, number, expert, value};
}
/* Whether one cut comes before another in the new pool. */
static int before(const Cut *a, const Cut *b) {
    if (a->at != b->at) return a->at < b->at;
    if ((a->expert < 0) != (b->expert < 0)) return b->expert < 0; /* what is put in stands before what is left out */
    return a->value > b->value;
}

/* Writes the sizes of the pool after the cuts, which it sorts; returns its sum of peaks. */
static double rebuild(Search *s) {
    for (i64 i = 1; i < s->num_cuts; i++) {
        Cut cut = s->cuts[i];
        i64 at = i;
        for (; at > 0 && before(&cut, &s->cuts[at - 1]); at--) s->cuts[at] = s->cuts[at - 1];
        s->cuts[at] = cut;
    }
    double *v = s->new_sizes;
    i64 n = 0, read = 0;
    for (i64 c = 0; c < s->num_cuts; c++) {
        const Cut *cut = s->cuts + c;
        if (cut->at > read) {
            memcpy(v + n, s->sizes + read, sizeof(double) * (cut->at - read));
            n += cut->at - read, read = cut->at;
        }
        if (cut->expert < 0) read += cut->number;
        else for (i64 j = 0; j < cut->number; j++) v[n++] = cut->value;
    }
    memcpy(v + n, s->sizes + read, sizeof(double) * (s->num_pooled - read));
    n += s->num_pooled - read;
    double sum[4] = {0, 0, 0, 0};
    i64 half = n / 2, i = 0;
    for (; i + 4 <= half; i += 4)
        for (i64 j = 0; j < 4; j++) sum[j] += v[i + j] * v[n - 1 - i - j];
    for (; i < half; i++) sum[i & 3] += v[i] * v[n - 1 - i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* Makes the pool the one that `rebuild` has seen. */
static void keep(Search *s) {
    i64 n = 0, read = 0;
    for (i64 c = 0; c < s->num_cuts; c++) {
        const Cut *cut = s->cuts + c;
        if (cut->at > read) {
            memcpy(s->new_experts + n, s->experts + read, sizeof(i64) * (cut->at - read));
            n += cut->at - read, read = cut->at;
        }
        if (cut->expert < 0) read += cut->number;
        else for (i64 j = 0; j < cut->number; j++) s->new_experts[n++] = cut->expert;
    }
    memcpy(s->new_experts + n, s->experts + read, sizeof(i64) * (s->num_pooled - read));
    s->num_pooled = n + s->num_pooled - read;
    i64 *experts = s->experts;
    double *sizes = s->sizes;
    s->experts = s->new_experts, s->new_experts = experts;
    s->sizes = s->new_sizes, s->new_sizes = sizes;
}

static void set_place(Search *s, i64 rank, i64 place) {
    i64 other = s->order[place], old = s->place_of[rank];
    s->order[old] = other, s->place_of[other] = old;
    s->order[place] = rank, s->place_of[rank] = place;
}
static void break_rank(Search *s, i64 rank) {
    s->pooled[s->t->table[2 * rank]]++, s->pooled[s->t->table[2 * rank + 1]]++;
    set_place(s, rank, s->num_broken++);
}
static void mend_rank(Search *s, i64 rank) {
    s->pooled[s->t->table[2 * rank]]--, s->pooled[s->t->table[2 * rank + 1]]--;
    set_place(s, rank, --s->num_broken);
}

/* Whether every expert of the pool, without the pair of rank `out`, can be on different ranks of one fewer. */
static int fits_without(const Search *s, i64 out) {
    const i64 *pair = s->t->table + 2 * out;
    for (i64 i = 0; i < s->num_pooled; i++) {
        i64 expert = s->experts[i];
        if (expert == s->t->num_experts) continue;
        if (s->pooled[expert] - (expert == pair[0]) - (expert == pair[1]) > s->num_broken - 1) return 0;
    }
    return 1;
}

/* Breaks rank `in` and mends rank `out`; -1 = none. Returns whether that was accepted; sums: whole ranks, pool */
static int move_ranks(Search *s, i64 in, i64 out, double limit, double *sums) {
    const i64 *table = s->t->table;
    double change = 0;
    s->num_cuts = 0;
    if (out >= 0) {
        i64 a = table[2 * out], b = table[2 * out + 1];
        if (s->pooled[a] < 1 + (a == b) || s->pooled[b] < 1) return 0;
        if (in < 0 && !fits_without(s, out)) return 0;
        change += peak(s, out);
        leave_out(s, a, 1 + (a == b));
        if (a != b) leave_out(s, b, 1);
    }
    if (in >= 0) {
        for (i64 k = 0; k < 2; k++) {
            i64 expert = table[2 * in + k];
            i64 leaving = out < 0 ? 0 : (table[2 * out] == expert) + (table[2 * out + 1] == expert);
            i64 room = s->num_broken + (out < 0);
            if (expert < s->t->num_experts && s->pooled[expert] - leaving >= room) return 0;
            put_in(s, expert, 1, s->value[expert], s->pooled[expert] - leaving);
        }
        change -= peak(s, in);
    }
    double pool = rebuild(s);
    double delta = change + (pool - sums[1]) + *s->t->price * ((in >= 0) - (out >= 0));
    if (delta > limit) return 0;
    keep(s);
    if (out >= 0) mend_rank(s, out);
    if (in >= 0) break_rank(s, in);
    sums[0] += change;
    sums[1] = pool;
    return 1;
}

/* Breaks rank `in` (-1 = none), then turns a replica of `giver` in the pool into one of `taker`. */
static int change_counts(Search *s, i64 in, i64 taker, i64 giver, double limit, double *sums) {
    const Task *t = s->t;
    i64 empty = t->num_experts;
    double more = t->values[t->start[taker] + s->count[taker] + 1];
    double fewer = giver == empty ? s->value[empty] : t->values[t->start[giver] + s->count[giver] - 1];
    i64 takers = s->pooled[taker] + 1, givers = s->pooled[giver] - 1;
    double change = 0;
    s->num_cuts = 0;
    if (in >= 0) {
        i64 other = partner(s, in, giver);
        if (other == taker) return 0;
        if (other < empty && s->pooled[other] > s->num_broken) return 0;
        change -= peak(s, in);
        givers += 1 + (other == giver);
        if (other != giver) put_in(s, other, 1, s->value[other], s->pooled[other]);
    }
    if (takers > s->num_broken + (in >= 0)) return 0;
    leave_out(s, taker, s->pooled[taker]);
    leave_out(s, giver, s->pooled[giver]);
    put_in(s, giver, givers, fewer, 0);
    put_in(s, taker, takers, more, 0);
    double pool = rebuild(s);
    for (i64 h = s->holder_start[taker]; h < s->holder_start[taker + 1]; h++) {
        i64 rank = s->holders[h];
        if (s->place_of[rank] < s->num_broken || rank == in) continue;
        i64 other = partner(s, rank, taker);
        change += other == giver ? more * fewer - s->value[taker] * s->value[giver]
                                 : s->value[other] * (more - s->value[taker]);
    }
    for (i64 h = giver == empty ? 0 : s->holder_start[giver]; giver < empty && h < s->holder_start[giver + 1]; h++) {
        i64 rank = s->holders[h];
        if (s->place_of[rank] < s->num_broken || rank == in) continue;
        i64 other = partner(s, rank, giver);
        if (other != taker) change += s->value[other] * (fewer - s->value[giver]);
    }
    double delta = change + (pool - sums[1]) + *t->price * (in >= 0);
    if (delta > limit) return 0;
    keep(s);
    if (in >= 0) break_rank(s, in);
    s->pooled[giver]--, s->pooled[taker]++;
    s->count[giver]--, s->count[taker]++;
    s->value[giver] = fewer, s->value[taker] = more;
    sums[0] += change;
    sums[1] = pool;
    return 1;
}

static int propose(Search *s, u64 first, u64 second, double limit, double *sums) {
    const Task *t = s->t;
    i64 num_ranks = t->num_ranks, kind = first & 7, broken = s->num_broken, whole = num_ranks - broken;
    if (kind < 5 && !t->all_broken) {
        if ((kind != 3 && broken == 0) || (kind != 4 && whole == 0)) return 0;
        if (kind == 3 && broken >= t->max_broken) return 0;
        i64 out = kind == 3 ? -1 : s->order[below(first, broken)];
        i64 in = kind == 4 ? -1 : s->order[broken + below(second, whole)];
        return move_ranks(s, in, out, limit, sums);
    }
    i64 in = -1, giver, taker;
    if (!t->all_broken && (kind == 5 || broken == 0)) {
        if (broken >= t->max_broken || whole == 0) return 0;
        in = s->order[broken + below(first, whole)];
        giver = t->table[2 * in + (first >> 3 & 1)];
    } else
        giver = s->experts[below(first, s->num_pooled)];
    if (first >> 4 & 1)
        taker = below(second, t->num_experts);
    else { /* one of the heavier of two ranks */
        i64 one = below(second, num_ranks), two = below(second * 0x9E3779B97F4A7C15ull, num_ranks);
        if (t->all_broken) { /* a rank is a pair of the pool */
            const double *v = s->sizes;
            i64 last = s->num_pooled - 1, i = v[one] * v[last - one] > v[two] * v[last - two] ? one : two;
            taker = s->experts[first >> 5 & 1 ? last - i : i];
        } else
            taker = t->table[2 * (peak(s, one) > peak(s, two) ? one : two) + (first >> 5 & 1)];
    }
    if (taker == giver || taker == t->num_experts || s->count[taker] >= t->most[taker]) return 0;
    if (giver != t->num_experts && s->count[giver] <= t->least[giver]) return 0;
    return change_counts(s, in, taker, giver, limit, sums);
}

/* The sum of the peaks of whole ranks; changes of it leave an error where they are much larger than what is left. */
static double sum_whole(const Search *s) {
    double sum = 0;
    for (i64 r = 0; r < s->t->num_ranks; r++)
        if (s->place_of[r] >= s->num_broken) sum += peak(s, r);
    return sum;
}

/* Returns how many ranks are broken: their ids in broken, the replicas for them in pool, heaviest first. */
i64 search_pairs(const Task *t) {
    i64 num_ranks = t->num_ranks, num_experts = t->num_experts, *at = t->numbers;
    Search s = {.t = t};
    s.order = at, at += num_ranks, s.place_of = at, at += num_ranks;
    s.holders = at, at += 2 * num_ranks, s.experts = at, at += 2 * num_ranks, s.new_experts = at, at += 2 * num_ranks;
    s.count = at, at += num_experts + 1, s.pooled = at, at += num_experts + 1;
    s.holder_start = at;
    s.sizes = t->reals, s.new_sizes = s.sizes + 2 * num_ranks, s.value = s.new_sizes + 2 * num_ranks;
    memset(s.count, 0, sizeof(i64) * 3 * (num_experts + 1));
    for (i64 i = 0; i < 2 * num_ranks; i++) s.count[t->table[i]]++;
    for (i64 e = 0; e < num_experts; e++) s.holder_start[e + 1] = s.holder_start[e] + s.count[e];
    memcpy(s.pooled, s.holder_start, sizeof(i64) * num_experts); /* where the next holder goes, for now */
    for (i64 i = 0; i < 2 * num_ranks; i++)
        if (t->table[i] < num_experts) s.holders[s.pooled[t->table[i]]++] = i / 2;
    memset(s.pooled, 0, sizeof(i64) * num_experts);
    for (i64 e = 0; e < num_experts; e++) s.value[e] = t->values[t->start[e] + s.count[e]];
    s.value[num_experts] = t->values[t->start[num_experts]];
    for (i64 r = 0; r < num_ranks; r++) s.order[r] = s.place_of[r] = r;
    s.num_broken = s.num_pooled = 0;
    double sums[2] = {sum_whole(&s), 0};
    for (i64 r = 0; t->all_broken && r < num_ranks; r++) move_ranks(&s, r, -1, INFINITY, sums);
    double best = sums[0] + sums[1] + *t->price * s.num_broken;
    i64 best_broken = s.num_broken;
    memcpy(t->broken, s.order, sizeof(i64) * s.num_broken);
    memcpy(t->pool, s.experts, sizeof(i64) * s.num_pooled);
    u64 state = (u64)t->seed;
    for (i64 block = 0; block < t->num_blocks; block++)
        for (i64 step = 0; step < t->steps_per_block; step++) {
            u64 first = draw(&state), second = draw(&state);
            double limit = t->temperatures[block] * t->thresholds[second & 4095];
            double whole = sums[0];
            if (!propose(&s, first, second, limit, sums)) continue;
            if (fabs(sums[0] - whole) > LARGE_CHANGE) sums[0] = sum_whole(&s);
            double now = sums[0] + sums[1] + *t->price * s.num_broken;
            if (now >= best) continue;
            best = now;
            best_broken = s.num_broken;
            memcpy(t->broken, s.order, sizeof(i64) * s.num_broken);
            memcpy(t->pool, s.experts, sizeof(i64) * s.num_pooled);
        }
    return best_broken;
}
