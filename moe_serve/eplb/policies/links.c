/* Edits one layer's placement for the exact split: the loop of link_edits.py, to the bit, in C.
   Every sum is added in the same order, and of equal edits the first listed wins. Compiled without contraction into
   fused multiply-adds, which would round differently.
   Shape words: B batches, R ranks, K slots per rank, P = R x K, E experts. */
#include "../split/fractions.c"

typedef struct { /* laid out as link_edits.py writes it */
    Shape shape;
    i64 num_batches, min_replicas, budget, max_edits, max_rank_moves;
    i64 num_heavy, num_light, num_each; /* ranks, and experts of a heavy rank, that are tried: MOST at most */
    const double *numbers; /* target, least gain per move */
    const double *load;    /* [B][E] in mean rank loads */
    int32_t *table;        /* [P] edited in place; -1 = empty */
    const uint8_t *was;    /* [R][E] whether the rank holds the expert in the placement in use */
    i64 *log;              /* [max_edits][4] out: slot, other slot, expert or -1 for a swap, moves so far */
    double *gains;         /* [max_edits] out: in mean rank loads */
} Layer;

typedef struct {
    Split split;
    double *slot_load, *rank_load; /* [P], [R] means over batches */
    double top;                    /* heaviest rank, mean over batches */
} State;

enum { MOST = 16 };

/* Levels the ranks of the layer's table in every batch, and keeps the loads of heaviest rank, ranks and slots. */
static void level_table(const Layer *l, State *s) {
    i64 num_slots = l->shape.num_ranks * l->shape.slots;
    double sum = 0.0, number = (double)l->num_batches;
    list_replicas(&l->shape, &s->split, l->table);
    memset(s->slot_load, 0, (size_t)num_slots * sizeof(double));
    memset(s->rank_load, 0, (size_t)l->shape.num_ranks * sizeof(double));
    for (i64 b = 0; b < l->num_batches; b++) {
        sum += level_ranks(&l->shape, &s->split, l->load + b * l->shape.num_experts);
        for (i64 i = 0; i < num_slots; i++)
            if (s->split.replica_at[i] >= 0) s->slot_load[i] += s->split.own[s->split.replica_at[i]] / number;
        for (i64 r = 0; r < l->shape.num_ranks; r++) s->rank_load[r] += s->split.total[r] / number;
    }
    s->top = sum / number;
}

/* By how much another table lowers the heaviest rank's load, mean over batches. */
static double gain_of(const Layer *l, State *s, const int32_t *table) {
    double sum = 0.0;
    list_replicas(&l->shape, &s->split, table);
    for (i64 b = 0; b < l->num_batches; b++) sum += level_ranks(&l->shape, &s->split, l->load + b * l->shape.num_experts);
    return s->top - sum / (double)l->num_batches;
}

static int holds(const Layer *l, const int32_t *table, i64 rank, int32_t expert) {
    for (i64 i = rank * l->shape.slots; i < (rank + 1) * l->shape.slots; i++)
        if (table[i] == expert) return 1;
    return 0;
}

static i64 moves_to(const Layer *l, const int32_t *table, i64 rank) {
    i64 number = 0;
    for (i64 i = rank * l->shape.slots; i < (rank + 1) * l->shape.slots; i++)
        number += table[i] >= 0 && !l->was[rank * l->shape.num_experts + table[i]];
    return number;
}

/* The ids of the `number` largest (sign 1) or least (-1) values; of equal ones the first. Returns how many. */
static i64 list_extremes(const double *value, i64 length, double sign, i64 number, i64 *ids) {
    i64 found = 0;
    for (i64 i = 0; i < length; i++) {
        i64 at = found < number ? found : number;
        while (at > 0 && sign * value[ids[at - 1]] < sign * value[i]) at--;
        if (at == number) continue;
        if (found < number) found++;
        for (i64 j = found - 1; j > at; j--) ids[j] = ids[j - 1];
        ids[at] = i;
    }
    return found;
}

/* The slot of rank `light` that an expert of rank `heavy` takes, or -1: an empty one or that with the least load of
   those that may be given up; swap: of those whose expert may go to `heavy`. */
static i64 slot_for(const Layer *l, const State *s, const i64 *count, i64 heavy, i64 light, int swap) {
    i64 best = -1;
    for (i64 i = light * l->shape.slots; i < (light + 1) * l->shape.slots; i++) {
        int32_t own = l->table[i];
        if (own < 0) return i;
        if (swap ? holds(l, l->table, heavy, own) : count[own] <= l->min_replicas) continue;
        if (best < 0 || s->slot_load[i] < s->slot_load[best]) best = i;
    }
    return best;
}

typedef struct { double rate, gain; i64 slot, other, expert, moves; } Edit;

static void make(int32_t *table, const Edit *edit) {
    int32_t kept = table[edit->slot];
    table[edit->slot] = edit->expert < 0 ? table[edit->other] : (int32_t)edit->expert;
    if (edit->expert < 0) table[edit->other] = kept;
}

/* Keeps the edit in `best` if it gains more per move; moves: so far. */
static void try_edit(const Layer *l, State *s, int32_t *trial, Edit edit, i64 moves, Edit *best) {
    memcpy(trial, l->table, (size_t)(l->shape.num_ranks * l->shape.slots) * sizeof(int32_t));
    make(trial, &edit);
    i64 ranks[2] = {edit.slot / l->shape.slots, edit.other / l->shape.slots};
    edit.moves = moves;
    for (i64 i = 0; i < 1 + (edit.expert < 0); i++) {
        i64 arrived = moves_to(l, trial, ranks[i]), before = moves_to(l, l->table, ranks[i]);
        if (arrived > l->max_rank_moves && arrived > before) return;
        edit.moves += arrived - before;
    }
    if (edit.moves > l->budget && edit.moves > moves) return;
    i64 cost = edit.moves - moves;
    edit.gain = gain_of(l, s, trial);
    edit.rate = edit.gain / (cost > 0 ? (double)cost : 0.25); /* free ones count as a quarter of a move */
    if (edit.rate > best->rate * (1.0 + 1e-9)) *best = edit;
}

static i64 edit(const Layer *l, State *s, i64 *count, int32_t *trial) {
    i64 heavy[MOST], light[MOST], slots[MOST], done = 0, moves = 0;
    for (i64 r = 0; r < l->shape.num_ranks; r++) moves += moves_to(l, l->table, r);
    for (; done < l->max_edits; done++) {
        level_table(l, s);
        if (s->top * l->numbers[0] <= 1.0) break;
        memcpy(count, s->split.count, (size_t)l->shape.num_experts * sizeof(i64));
        i64 num_heavy = list_extremes(s->rank_load, l->shape.num_ranks, 1.0, l->num_heavy, heavy);
        i64 num_light = list_extremes(s->rank_load, l->shape.num_ranks, -1.0, l->num_light, light);
        Edit best = {l->numbers[1], 0.0, 0, 0, -1, 0};
        for (i64 h = 0; h < num_heavy; h++) {
            i64 first = heavy[h] * l->shape.slots;
            i64 num_each = list_extremes(s->slot_load + first, l->shape.slots, 1.0, l->num_each, slots);
            for (i64 k = 0; k < num_each; k++) {
                i64 from = first + slots[k];
                int32_t expert = l->table[from];
                for (i64 i = 0; expert >= 0 && i < num_light; i++) {
                    if (light[i] == heavy[h] || holds(l, l->table, light[i], expert)) continue;
                    i64 over = slot_for(l, s, count, heavy[h], light[i], 0);
                    if (over >= 0) try_edit(l, s, trial, (Edit){0.0, 0.0, over, over, expert, 0}, moves, &best);
                    i64 to = slot_for(l, s, count, heavy[h], light[i], 1);
                    if (to >= 0) try_edit(l, s, trial, (Edit){0.0, 0.0, from, to, -1, 0}, moves, &best);
                }
            }
        }
        if (best.gain <= 0.0) break;
        make(l->table, &best);
        moves = best.moves;
        i64 *line = l->log + 4 * done;
        line[0] = best.slot, line[1] = best.other, line[2] = best.expert, line[3] = moves;
        l->gains[done] = best.gain;
    }
    return done;
}

/* Edits the layer; returns the number of edits, or -1 without memory. */
i64 edit_links(const Layer *l) {
    size_t experts = (size_t)l->shape.num_experts, ranks = (size_t)l->shape.num_ranks;
    size_t slots = ranks * (size_t)l->shape.slots;
    i64 *count = malloc(experts * sizeof(i64)), done = -1;
    double *means = malloc((slots + ranks) * sizeof(double));
    int32_t *trial = malloc(slots * sizeof(int32_t));
    State s = {.slot_load = means, .rank_load = means + slots};
    if (make_split(&l->shape, &s.split) && count && means && trial) done = edit(l, &s, count, trial);
    free_split(&s.split);
    free(count);
    free(means);
    free(trial);
    return done;
}
