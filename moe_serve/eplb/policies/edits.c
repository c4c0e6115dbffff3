/* Edits one layer's placement: the loop of single_edits.py with the rule of edits.py, to the bit, in C.
   Every sum is added in the same order, every exp is that of edits.py, and of equal edits the first listed wins.
   Compiled without contraction into fused multiply-adds, which would round differently.
   Shape words: R ranks, K slots per rank, P = R x K, E experts. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

typedef struct { /* laid out as single_edits.py writes it */
    i64 num_experts, num_ranks, slots, num_heavy, min_replicas, budget, max_edits;
    i64 has_rule;           /* 0 = no hierarchy; 2: experts have homes of their own */
    i64 max_rank_moves;
    const double *numbers;  /* steepness, target, least gain per move, share of the load that may be off home */
    const double *unit;     /* [E] load in mean rank loads */
    const double *fixed;    /* [E] cost of each replica on its own */
    int32_t *table;         /* [P] edited in place; -1 = empty */
    const uint8_t *was;     /* [R][E] whether the rank holds the expert in the placement in use */
    i64 *home;              /* [E] home node, edited in place */
    const i64 *node_of;     /* [R] */
    i64 *log;               /* [max_edits][4] out: slot, other slot, expert or -1 for a swap, moves so far */
    double *gains;          /* [max_edits] out: in mean rank loads */
} Layer;

typedef struct {
    double top, steep, total_peak;
    i64 *count, *at_home;                                           /* [E] */
    i64 *arrived;                                                   /* [R] slots that have moved */
    double *each, *size, *inverse, *grows, *shrinks, *extra, *over; /* [E + 1], of experts; E = empty slot */
    double *load, *slot_size, *rest, *rank_load, *peak;            /* [P], [P], [P], [R], [R] */
    double *slot_peak, *helped;                                    /* [P] of the slot's rank; [E + 1] */
    uint8_t *held, *moved;                                         /* [R][E], [P] */
    uint8_t *may;                                                  /* [E] may gain a replica off home */
    double *both;                                                  /* [E] peaks of ranks that hold it and the one overwritten */
    double *shared;                                                /* [E] what the two changes there spare, together */
    double *there;                                                 /* [P] what a slot of the heavy rank meets */
    i64 num_moved;
} State;

typedef struct { double rate, gain; i64 slot, other, expert; } Edit;

static double repeatable_exp(double x) {
    static const double terms[14] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                     1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0,
                                     1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0};
    const double to_integer = 1.5 * 4503599627370496.0;
    x = x > -700.0 ? x : -700.0;
    x = x < 700.0 ? x : 700.0;
    double power = (x * 1.4426950408889634 + to_integer) - to_integer;
    double rest = (x - power * 6.93147180369123816490e-01) - power * 1.90821492927058770002e-10, value = terms[0];
    for (int i = 1; i < 14; i++) value = value * rest + terms[i];
    union { i64 bits; double number; } scale = {((i64)power + 1023) << 52};
    return value * scale.number;
}

static double least(double a, double b) { return a < b ? a : b; }

/* An edit that costs nothing, or takes moves back, counts as a quarter of a move. */
static const double PER_MOVE[5] = {4.0, 4.0, 4.0, 1.0, 0.5}; /* by cost + 2 */

/* Gains are computed in blocks, which the compiler turns into vectors; few blocks hold one that matters. */
enum { BLOCK = 64 };

static int any_above(const double *gains, i64 number, double rate) {
    int found = 0;
    for (i64 i = 0; i < number; i++) found |= gains[i] * 4.0 > rate;
    return found;
}

static double size_of(const Layer *l, i64 e, i64 count) { return l->unit[e] / (double)count + l->fixed[e]; }

/* What follows from the replicas of an expert. */
static void refresh_expert(const Layer *l, State *s, i64 e) {
    i64 count = s->count[e] > 1 ? s->count[e] : 1;
    double each = size_of(l, e, count), more = size_of(l, e, s->count[e] + 1);
    double fewer = size_of(l, e, s->count[e] > 2 ? s->count[e] - 1 : 1);
    s->size[e] = repeatable_exp(s->steep * each);
    s->inverse[e] = repeatable_exp(-(s->steep * each));
    s->grows[e] = repeatable_exp(least(s->steep * (fewer - each), 600.0)) - 1.0;
    s->shrinks[e] = repeatable_exp(s->steep * (more - each)) - 1.0;
    s->extra[e] = repeatable_exp(least(s->steep * more, 600.0));
}

static void refresh(const Layer *l, State *s, i64 changed, i64 changed_too) {
    i64 E = l->num_experts, R = l->num_ranks, K = l->slots, P = R * K;
    double top = 0.0;
    for (i64 r = 0; r < R; r++) {
        double sum = 0.0;
        for (i64 k = 0; k < K; k++) {
            i64 p = r * K + k, e = l->table[p] < 0 ? E : l->table[p];
            s->load[p] = s->each[e];
            sum = sum + s->load[p];
        }
        s->rank_load[r] = sum;
        top = r == 0 || sum > top ? sum : top;
    }
    double steep = least(l->numbers[0], 500.0 / (top > 1e-9 ? top : 1e-9));
    int all = steep != s->steep; /* what is kept for each expert depends on it */
    s->top = top;
    s->steep = steep;
    if (all)
        for (i64 e = 0; e < E; e++) refresh_expert(l, s, e);
    else {
        refresh_expert(l, s, changed);
        if (changed_too >= 0) refresh_expert(l, s, changed_too);
    }
    s->total_peak = 0.0;
    for (i64 r = 0; r < R; r++) s->peak[r] = repeatable_exp(steep * (s->rank_load[r] - top));
    for (i64 r = 0; r < R; r++) s->total_peak = s->total_peak + s->peak[r];
    memset(s->over, 0, sizeof(double) * (E + 1));
    for (i64 r = 0; r < R; r++)
        for (i64 k = 0; k < K; k++) {
            i64 p = r * K + k, e = l->table[p] < 0 ? E : l->table[p];
            s->over[e] = s->over[e] + s->peak[r];
            s->slot_size[p] = s->size[e];
            s->rest[p] = s->peak[r] * s->inverse[e];
            s->slot_peak[p] = s->peak[r];
        }
    for (i64 e = 0; e < E; e++) s->helped[e] = s->over[e] * s->shrinks[e];
}

static void put(const Layer *l, State *s, i64 slot, i64 expert) {
    i64 E = l->num_experts, r = slot / l->slots, old = l->table[slot];
    if (old >= 0) {
        s->held[r * E + old] = 0;
        s->count[old]--;
        if (l->has_rule) s->at_home[old] -= l->node_of[r] == l->home[old];
    }
    i64 moved = expert >= 0 && !l->was[r * E + expert], more = moved - s->moved[slot];
    l->table[slot] = (int32_t)expert;
    s->moved[slot] = (uint8_t)moved;
    s->num_moved += more;
    s->arrived[r] += more;
    if (expert >= 0) {
        s->count[expert]++;
        if (l->has_rule) s->at_home[expert] += l->node_of[r] == l->home[expert];
    }
}

static void hold(const Layer *l, State *s, i64 slot) {
    if (l->table[slot] >= 0) s->held[slot / l->slots * l->num_experts + l->table[slot]] = 1;
}

static void each_of(const Layer *l, State *s, i64 e) { s->each[e] = size_of(l, e, s->count[e] > 1 ? s->count[e] : 1); }

/* Whether a rank may not receive an expert into this slot: it has received as many as it may, and this one is not in
   the place of one of them. */
static int is_full(const Layer *l, const State *s, i64 slot) {
    return s->arrived[slot / l->slots] >= l->max_rank_moves && !s->moved[slot];
}

/* Whether an expert may swap places with one of another node: its home then goes with it. */
static int may_change_node(const Layer *l, const State *s, i64 expert) {
    return expert < 0 || (l->has_rule == 2 && s->count[expert] == 1);
}

static void best_swap(const Layer *l, const State *s, i64 room, Edit *best) {
    i64 E = l->num_experts, R = l->num_ranks, K = l->slots, P = R * K;
    i64 num_heavy = l->num_heavy < R ? l->num_heavy : R, heavy[64];
    for (i64 i = 0; i < num_heavy; i++) { /* the heaviest ranks, lower ids first */
        i64 found = -1;
        for (i64 r = 0; r < R; r++) {
            int taken = 0;
            for (i64 j = 0; j < i; j++) taken |= heavy[j] == r;
            if (!taken && (found < 0 || s->rank_load[r] > s->rank_load[found])) found = r;
        }
        heavy[i] = found;
    }
    for (i64 i = 0; i < num_heavy; i++) {
        i64 h = heavy[i];
        for (i64 p = 0; p < P; p++) { /* what another slot's expert would cost on this rank; 9 = not allowed */
            i64 b = l->table[p];
            if (b < 0) s->there[p] = 0.0 - s->moved[p];
            else s->there[p] = s->held[h * E + b] ? 9.0 : (double)(!l->was[h * E + b]) - s->moved[p];
        }
        for (i64 k = 0; k < K; k++) {
            i64 mine = h * K + k, a = l->table[mine];
            double my_rest = s->rest[mine], my_size = s->slot_size[mine];
            int am_full = is_full(l, s, mine);
            for (i64 first = 0; first < P; first += BLOCK) {
                i64 number = P - first < BLOCK ? P - first : BLOCK;
                const double *peak = s->slot_peak + first, *size = s->slot_size + first, *rest = s->rest + first;
                double gains[BLOCK];
                for (i64 i = 0; i < number; i++)
                    gains[i] = ((s->peak[h] + peak[i]) - my_rest * size[i]) - my_size * rest[i];
                if (!any_above(gains, number, best->rate)) continue;
                for (i64 i = 0; i < number; i++) {
                    i64 p = first + i, r = p / K;
                    if (gains[i] * 4.0 <= best->rate || (a >= 0 && s->held[r * E + a])) continue;
                    if (l->has_rule && l->node_of[r] != l->node_of[h] &&
                        !(may_change_node(l, s, a) && may_change_node(l, s, l->table[p]))) continue;
                    if (am_full && l->table[p] >= 0 && !l->was[h * E + l->table[p]]) continue;
                    if (a >= 0 && !l->was[r * E + a] && is_full(l, s, p)) continue;
                    double cost = (a >= 0 ? (double)(!l->was[r * E + a]) : 0.0) - s->moved[mine] + s->there[p];
                    if (cost > 2.0 || cost > (double)room) continue;
                    double rate = PER_MOVE[(i64)cost + 2] * gains[i];
                    if (rate > best->rate) *best = (Edit){rate, gains[i], mine, p, -1};
                }
            }
        }
    }
}

/* Which experts may have one more replica off home: the share served there stays within the budget. With a budget of 0
   not even an idle expert may. */
static void may_go_off_home(const Layer *l, State *s) {
    double off = 0.0, total = 0.0;
    for (i64 e = 0; e < l->num_experts; e++) {
        i64 count = s->count[e] > 1 ? s->count[e] : 1;
        off = off + l->unit[e] * (1.0 - (double)s->at_home[e] / (double)count);
        total = total + l->unit[e];
    }
    double most = l->numbers[3] > 0.0 ? l->numbers[3] * (total > 1e-300 ? total : 1e-300) : -1.0;
    for (i64 e = 0; e < l->num_experts; e++) {
        i64 count = s->count[e] > 1 ? s->count[e] : 1;
        double now = l->unit[e] * (1.0 - (double)s->at_home[e] / (double)count);
        s->may[e] = (off - now) + l->unit[e] * (1.0 - (double)s->at_home[e] / (double)(count + 1)) <= most;
    }
}

/* Fills `shared` for an overwrite of `old` on rank r: where a rank holds `old` and e, one grows and the other shrinks.
   Returns the most of it. */
static double spare_shared(const Layer *l, State *s, i64 r, i64 old) {
    i64 E = l->num_experts, R = l->num_ranks, K = l->slots;
    double most = 0.0;
    memset(s->both, 0, sizeof(double) * E);
    memset(s->shared, 0, sizeof(double) * E);
    if (old < 0) return most;
    for (i64 other = 0; other < R; other++) {
        if (other == r || !s->held[other * E + old]) continue;
        for (i64 k = 0; k < K; k++) {
            i64 e = l->table[other * K + k];
            if (e < 0) continue;
            s->both[e] = s->both[e] + s->peak[other];
            s->shared[e] = -(s->both[e] * (s->grows[old] * s->shrinks[e]));
            most = s->shared[e] > most ? s->shared[e] : most;
        }
    }
    return most;
}

static void best_overwrite(const Layer *l, State *s, i64 room, Edit *best) {
    i64 E = l->num_experts, R = l->num_ranks, K = l->slots, P = R * K;
    double helps = 0.0; /* the most that a further replica can help by making its expert's others lighter */
    for (i64 e = 0; e < E; e++) helps = -s->helped[e] > helps ? -s->helped[e] : helps;
    if (l->has_rule) may_go_off_home(l, s);
    for (i64 p = 0; p < P; p++) {
        i64 r = p / K, old = l->table[p];
        if (old >= 0 && s->count[old] <= l->min_replicas) continue;
        if (l->has_rule && old >= 0 && l->home[old] == l->node_of[r] &&
            (s->at_home[old] <= 1 || s->at_home[old] < s->count[old])) continue; /* must stay */
        double raised = old < 0 ? 0.0 : (s->over[old] - s->peak[r]) * s->grows[old];
        double lost = s->peak[r] - raised, rest = s->rest[p], spared = spare_shared(l, s, r, old);
        if (((lost + helps) + spared) * 4.0 <= best->rate) continue;
        int full = is_full(l, s, p);
        for (i64 first = 0; first < E; first += BLOCK) {
            i64 number = E - first < BLOCK ? E - first : BLOCK;
            double gains[BLOCK];
            for (i64 i = 0; i < number; i++) {
                i64 e = first + i;
                gains[i] = ((lost - s->helped[e]) - rest * s->extra[e]) + s->shared[e];
            }
            if (!any_above(gains, number, best->rate)) continue;
            for (i64 i = 0; i < number; i++) {
                i64 e = first + i;
                if (gains[i] * 4.0 <= best->rate || s->held[r * E + e]) continue;
                if (l->has_rule && l->home[e] != l->node_of[r] && !s->may[e]) continue;
                i64 cost = !l->was[r * E + e] - s->moved[p];
                if (cost > room || (cost > 0 && full)) continue;
                double rate = PER_MOVE[cost + 2] * gains[i];
                if (rate > best->rate) *best = (Edit){rate, gains[i], p, p, e};
            }
        }
    }
}

static int allocate(const Layer *l, State *s, char **memory) {
    i64 E = l->num_experts, R = l->num_ranks, P = R * l->slots;
    size_t doubles = 8 * (E + 1) + 2 * E + 5 * P + 2 * R, integers = 2 * E + R, bytes = R * E + P + E;
    *memory = calloc(1, 8 * (doubles + integers) + bytes);
    if (!*memory) return 0;
    double *d = (double *)*memory;
    double **experts[] = {&s->each, &s->size, &s->inverse, &s->grows, &s->shrinks, &s->extra, &s->over, &s->helped};
    for (int i = 0; i < 8; i++, d += E + 1) *experts[i] = d;
    double **slots[] = {&s->load, &s->slot_size, &s->rest, &s->there, &s->slot_peak};
    for (int i = 0; i < 5; i++, d += P) *slots[i] = d;
    s->both = d;
    s->shared = d + E;
    d += 2 * E;
    s->rank_load = d;
    s->peak = d + R;
    s->count = (i64 *)(d + 2 * R);
    s->at_home = s->count + E;
    s->arrived = s->at_home + E;
    s->held = (uint8_t *)(s->arrived + R);
    s->moved = s->held + R * E;
    s->may = s->moved + P;
    return 1;
}

/* Makes edits until the target is met, the budget spent, or nothing gains enough. Returns their number, -1 without memory. */
i64 edit_layer(i64 address) {
    const Layer *l = (const Layer *)address;
    i64 E = l->num_experts, R = l->num_ranks, P = R * l->slots, done = 0;
    State state = {0}, *s = &state;
    char *memory;
    if (!allocate(l, s, &memory)) return -1;
    s->size[E] = s->inverse[E] = 1.0;
    for (i64 p = 0; p < P; p++) { /* put() once more what is there already */
        i64 e = l->table[p];
        l->table[p] = -1;
        put(l, s, p, e);
        hold(l, s, p);
    }
    for (i64 e = 0; e < E; e++) each_of(l, s, e);
    s->steep = -1.0;
    refresh(l, s, -1, -1);
    for (; done < l->max_edits; done++) {
        double sum = 0.0;
        for (i64 r = 0; r < R; r++) sum = sum + s->rank_load[r];
        double reached = s->top > 0.0 ? sum / (double)R / s->top : 1.0;
        if (!(reached < l->numbers[1]) || s->num_moved >= l->budget) break;
        Edit best = {0}; /* an edit replaces it only if it gains more, so the first of equal ones stays, and a swap */
        best_swap(l, s, l->budget - s->num_moved, &best);
        best_overwrite(l, s, l->budget - s->num_moved, &best);
        double scale = s->steep * s->total_peak, enough = l->numbers[2] * scale;
        if (!(best.rate > (enough > 1e-9 ? enough : 1e-9))) break;
        i64 changed = l->table[best.slot], too;
        if (best.expert < 0) {
            i64 mine = l->table[best.slot], theirs = l->table[best.other];
            i64 node = l->has_rule ? l->node_of[best.slot / l->slots] : 0;
            i64 far = l->has_rule ? l->node_of[best.other / l->slots] : 0;
            put(l, s, best.slot, -1);
            if (node != far && mine >= 0) l->home[mine] = far;
            put(l, s, best.other, mine);
            if (node != far && theirs >= 0) l->home[theirs] = node;
            put(l, s, best.slot, theirs);
            hold(l, s, best.other);
            too = theirs;
        } else {
            put(l, s, best.slot, best.expert);
            too = best.expert;
        }
        hold(l, s, best.slot);
        i64 *line = l->log + 4 * done;
        line[0] = best.slot, line[1] = best.other, line[2] = best.expert, line[3] = s->num_moved;
        l->gains[done] = best.gain / scale;
        if (changed >= 0) each_of(l, s, changed);
        if (too >= 0) each_of(l, s, too);
        if (changed < 0) changed = too, too = -1;
        refresh(l, s, changed, too);
    }
    free(memory);
    return done;
}
