/* How replicas share a batch, and which slot serves each token, in C: the integers of policy.py, exact.py,
   time.py and make.py, with the same order and ties. See there for the methods.
   Shape words: R ranks, E experts, P slots, C replicas of experts that live on several ranks, S sources (R, or 1).
   Counts of one batch sum to at most 2^53, so only the product in the water level needs 128 bits. */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

typedef struct { /* laid out as policy.py writes it */
    i64 num_ranks, num_logical, num_slots, layer_row, is_exact, num_reaches, num_fixed, num_replicated, num_live;
    i64 weight_rows, tile_rows;                       /* of the split by time; no tiles = by tokens */
    const i64 *reaches;                               /* [num_reaches]: ranks of a group, ascending */
    const i64 *slot_start, *slots;                    /* [E + 1], [<= P]: slots of each expert, ascending */
    const i64 *fixed_expert, *fixed_slot, *fixed_rank; /* [num_fixed]: experts that live on one rank */
    const i64 *experts, *replica_start;               /* [num_replicated], [num_replicated + 1] */
    const i64 *replica_rank, *replica_slot, *owner;   /* [C] */
    const i64 *holder_start, *holder_replica;         /* [R + 1], [C] */
    const i64 *live;                                  /* [num_live]: ranks that have a slot in use */
    i64 *scratch;                                     /* see policy.py */
    const i64 *totals;                                /* [E]: of split_totals */
    i64 *total_rows;                                  /* [P]: what it writes */
    i64 *outcomes;                                    /* [3]: exact batches proven at once, after repair, not proven */
    /* for batches without sources, from the first of them on: a spanning forest, leaves first */
    i64 num_edges;
    const i64 *child, *parent, *child_replica, *parent_replica;
} Layer;

enum { TICKS = 16, LARGEST_ROWS = 1 << 27 }; /* beyond, the weights do not count, and squares would overflow */

static i64 ceil_div(i64 a, i64 b) { return a / b + (a % b > 0); }
static i64 least(i64 a, i64 b) { return a < b ? a : b; }

/* Every source's tokens of expert i go in turn to those of slots[start[i] .. start[i + 1]] that the first of the reaches
   holds which holds any; rows[source * stride + slot] grows. experts: NULL = 0 .. num_experts - 1;
   before: scratch [num_reaches * num_experts] */
static void share_in_turn(const Layer *l, i64 num_reaches, const i64 *counts, i64 num_sources, i64 num_experts,
                          const i64 *experts, const i64 *start, const i64 *slots, i64 *rows, i64 stride, i64 *before) {
    i64 slots_per_rank = l->num_slots / l->num_ranks;
    for (i64 source = 0; source < num_sources; source++, rows += stride) {
        for (i64 k = 0; k < num_reaches; k++)
            if (source % l->reaches[k] == 0) memset(before + k * num_experts, 0, sizeof(i64) * num_experts);
        for (i64 i = 0; i < num_experts; i++) {
            i64 expert = experts ? experts[i] : i, tokens = counts[source * l->num_logical + expert];
            i64 first = start[i], end = start[i + 1];
            if (end - first == 1) { /* first, without a test for zero, whose branch would be mispredicted */
                rows[slots[first]] += tokens;
                continue;
            }
            if (tokens == 0) continue;
            for (i64 k = 0; k < num_reaches; k++) {
                i64 width = l->reaches[k] * slots_per_rank, begin = source / l->reaches[k] * width, low = first, high;
                while (low < end && slots[low] < begin) low++;
                for (high = low; high < end && slots[high] < begin + width;) high++;
                i64 number = high - low;
                if (number == 0) continue;
                i64 *ahead = before + k * num_experts + i, share = tokens / number, odd = tokens % number;
                i64 turn = (*ahead + expert + l->layer_row) % number;
                *ahead += tokens;
                for (i64 j = 0; j < number; j++)
                    rows[slots[low + j]] += share + ((j < turn ? j - turn + number : j - turn) < odd);
                break;
            }
        }
    }
}

static void water_fill(const Layer *l, const i64 *tokens_of, i64 *load, i64 *given, i64 *order) {
    i64 n = l->num_replicated;
    for (i64 i = 0; i < n; i++) { /* stable insertion sort, most tokens first */
        i64 tokens = tokens_of[i], at = i;
        for (; at > 0 && tokens_of[order[at - 1]] < tokens; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    for (i64 k = 0; k < n; k++) {
        i64 i = order[k], tokens = tokens_of[i], first = l->replica_start[i], end = l->replica_start[i + 1];
        if (tokens == 0) break;
        if (end - first == 2) { /* the usual case in closed form, with the ties of the general one */
            i64 swap = load[l->replica_rank[first + 1]] < load[l->replica_rank[first]];
            i64 low = first + swap, high = first + 1 - swap, a = l->replica_rank[low], b = l->replica_rank[high];
            i64 to_low = least(tokens, (tokens + load[b] - load[a] + 1) >> 1);
            given[low] += to_low;
            given[high] += tokens - to_low;
            load[a] += to_low;
            load[b] += tokens - to_low;
            continue;
        }
        i64 *by_load = order + n, m = end - first; /* behind the n indices */
        for (i64 j = 0; j < m; j++) {
            i64 c = first + j, at = j;
            for (; at > 0 && load[l->replica_rank[by_load[at - 1]]] > load[l->replica_rank[c]]; at--)
                by_load[at] = by_load[at - 1];
            by_load[at] = c;
        }
        i64 below = 0, num_filled = 0;
        for (i64 j = 0; j < m; j++) {
            i64 height = load[l->replica_rank[by_load[j]]];
            if ((__int128)num_filled * height - below >= tokens) break;
            below += height;
            num_filled++;
        }
        i64 level = (tokens + below) / num_filled, extra = (tokens + below) % num_filled;
        for (i64 j = 0; j < num_filled; j++) {
            i64 rank = l->replica_rank[by_load[j]];
            i64 amount = level + (j < extra) - load[rank];
            given[by_load[j]] += amount;
            load[rank] += amount;
        }
    }
}

/* Gives every replica of an expert the same share of its tokens_of[i] tokens; adds to load and given. */
static void share_evenly(const Layer *l, const i64 *tokens_of, i64 *load, i64 *given) {
    for (i64 i = 0; i < l->num_replicated; i++) {
        i64 first = l->replica_start[i], end = l->replica_start[i + 1], number = end - first;
        i64 share = number == 2 ? tokens_of[i] >> 1 : tokens_of[i] / number, odd = tokens_of[i] - share * number;
        for (i64 c = first; c < end; c++) {
            i64 amount = share + (c - first < odd);
            given[c] += amount;
            load[l->replica_rank[c]] += amount;
        }
    }
}

/* Brings every rank to the mean of all, leaves first, as far as the expert that it shares with its parent allows. */
static void level_forest(const Layer *l, i64 *load, i64 *given) {
    i64 total = 0;
    for (i64 r = 0; r < l->num_ranks; r++) total += load[r];
    i64 level = ceil_div(total, l->num_live);
    for (i64 k = 0; k < l->num_edges; k++) {
        i64 rank = l->child[k], up = l->parent[k], mine = l->child_replica[k], theirs = l->parent_replica[k];
        i64 amount = load[rank] - level; /* to the parent, or from it */
        if (amount > given[mine]) amount = given[mine];
        if (amount < -given[theirs]) amount = -given[theirs];
        given[mine] -= amount;
        load[rank] -= amount;
        given[theirs] += amount;
        load[up] += amount;
    }
}

/* Pushes tokens along paths until the largest load is the smallest possible. cut [R]: the ranks that prove it;
   search: scratch [4 * R]. Returns the bound, the number of pushes and the size of the cut. */
static i64 level_loads(const Layer *l, i64 *load, i64 *given, i64 *cut, i64 *num_cut, i64 *num_pushes, i64 *search) {
    i64 num_ranks = l->num_ranks, total = 0;
    i64 *via_give = search, *via_take = via_give + num_ranks, *queue = via_take + num_ranks, *seen = queue + num_ranks;
    for (i64 r = 0; r < num_ranks; r++) total += load[r];
    memcpy(cut, l->live, sizeof(i64) * l->num_live);
    *num_cut = l->num_live;
    *num_pushes = 0;
    i64 bound = ceil_div(total, l->num_live);
    for (;;) {
        i64 source = 0, target = -1, head = 0, tail = 0;
        for (i64 r = 1; r < num_ranks; r++)
            if (load[r] > load[source]) source = r;
        if (load[source] <= bound) return bound;
        memset(seen, 0, sizeof(i64) * num_ranks);
        seen[source] = 1;
        queue[tail++] = source;
        while (head < tail && target < 0) {
            i64 rank = queue[head++];
            for (i64 h = l->holder_start[rank]; h < l->holder_start[rank + 1] && target < 0; h++) {
                i64 give = l->holder_replica[h], i = l->owner[give];
                if (given[give] == 0) continue;
                for (i64 take = l->replica_start[i]; take < l->replica_start[i + 1]; take++) {
                    i64 other = l->replica_rank[take];
                    if (seen[other]) continue;
                    seen[other] = 1;
                    via_give[other] = give;
                    via_take[other] = take;
                    if (load[other] < bound) {
                        target = other;
                        break;
                    }
                    queue[tail++] = other;
                }
            }
        }
        if (target < 0) {
            i64 sum = 0;
            for (i64 q = 0; q < tail; q++) sum += load[queue[q]];
            memcpy(cut, queue, sizeof(i64) * tail);
            *num_cut = tail;
            bound = ceil_div(sum, tail);
            continue;
        }
        i64 amount = least(load[source] - bound, bound - load[target]);
        for (i64 r = target; r != source; r = l->replica_rank[via_give[r]]) amount = least(amount, given[via_give[r]]);
        load[source] -= amount;
        load[target] += amount;
        for (i64 r = target; r != source; r = l->replica_rank[via_give[r]]) {
            given[via_give[r]] -= amount;
            given[via_take[r]] += amount;
        }
        ++*num_pushes;
    }
}

/* Returns whether no split has a smaller largest load: the tokens that live on the cut alone fill it to this height. */
static int is_proven(const Layer *l, const i64 *totals, const i64 *load, const i64 *cut, i64 num_cut, i64 *inside) {
    i64 confined = 0, most = 0;
    memset(inside, 0, sizeof(i64) * l->num_ranks);
    for (i64 q = 0; q < num_cut; q++) inside[cut[q]] = 1;
    for (i64 i = 0; i < l->num_fixed; i++)
        if (inside[l->fixed_rank[i]]) confined += totals[l->fixed_expert[i]];
    for (i64 i = 0; i < l->num_replicated; i++) {
        i64 c = l->replica_start[i];
        while (c < l->replica_start[i + 1] && inside[l->replica_rank[c]]) c++;
        if (c == l->replica_start[i + 1]) confined += totals[l->experts[i]];
    }
    for (i64 r = 0; r < l->num_ranks; r++)
        if (load[r] > most) most = load[r];
    return ceil_div(confined, num_cut) == most;
}

/* Sends every source's tokens to replicas that take given[C] in all, over the shortest routes. left: scratch [R] */
static void send_short(const Layer *l, const i64 *counts, i64 *given, i64 *rows, i64 *left) {
    for (i64 i = 0; i < l->num_replicated; i++) {
        for (i64 r = 0; r < l->num_ranks; r++) left[r] = counts[r * l->num_logical + l->experts[i]];
        for (i64 k = 0; k < l->num_reaches; k++) {
            i64 width = l->reaches[k], source = 0;
            for (i64 c = l->replica_start[i]; c < l->replica_start[i + 1]; c++) {
                i64 first = l->replica_rank[c] / width * width;
                if (source < first) source = first;
                for (; given[c] > 0 && source < first + width; source += left[source] == 0) {
                    i64 amount = least(left[source], given[c]);
                    rows[source * l->num_slots + l->replica_slot[c]] += amount;
                    left[source] -= amount;
                    given[c] -= amount;
                }
            }
        }
    }
}

/* The time of rows of one expert, as ExpertTime.ticks. */
static i64 ticks(const Layer *l, i64 rows) {
    if (rows == 0) return 0;
    if (l->tile_rows > 1) rows = ceil_div(rows, l->tile_rows) * l->tile_rows;
    if (rows >= LARGEST_ROWS) return TICKS * rows;
    i64 square = TICKS * TICKS * (rows * rows + l->weight_rows * l->weight_rows), root = (i64)sqrt((double)square);
    while (root * root > square) root--;
    while ((root + 1) * (root + 1) <= square) root++;
    return root;
}

typedef struct { i64 peak, give, take, amount, back, mine, returned; } Move; /* give < 0: none */

static Move best_move(const Layer *l, const i64 *load, const i64 *given, i64 rank) {
    Move best = {load[rank], -1, -1, 0, -1, -1, 0};
    for (i64 h = l->holder_start[rank]; h < l->holder_start[rank + 1]; h++) {
        i64 give = l->holder_replica[h], i = l->owner[give];
        if (given[give] == 0) continue;
        i64 here = load[rank] - ticks(l, given[give]);
        for (i64 take = l->replica_start[i]; take < l->replica_start[i + 1]; take++) {
            i64 other = load[l->replica_rank[take]] - ticks(l, given[take]), low = 1, high = given[give];
            if (l->replica_rank[take] == rank || other >= best.peak) continue;
            while (low < high) {
                i64 middle = (low + high) / 2;
                if (other + ticks(l, given[take] + middle) >= here + ticks(l, given[give] - middle))
                    high = middle;
                else
                    low = middle + 1;
            }
            for (i64 amount = low; amount >= low - 1 && amount > 0; amount--) {
                i64 mine = here + ticks(l, given[give] - amount), theirs = other + ticks(l, given[take] + amount);
                i64 peak = mine > theirs ? mine : theirs;
                if (peak < best.peak) best = (Move){peak, give, take, amount, -1, -1, 0};
            }
        }
    }
    return best;
}

static Move best_exchange(const Layer *l, const i64 *load, const i64 *given, i64 rank) {
    Move best = {load[rank], -1, -1, 0, -1, -1, 0};
    i64 first = l->holder_start[rank], end = l->holder_start[rank + 1];
    for (i64 h = first; h < end; h++) {
        i64 give = l->holder_replica[h], i = l->owner[give];
        if (given[give] == 0) continue;
        i64 here = load[rank] - ticks(l, given[give]);
        for (i64 take = l->replica_start[i]; take < l->replica_start[i + 1]; take++) {
            i64 other = l->replica_rank[take];
            if (other == rank) continue;
            i64 there = load[other] + ticks(l, given[take] + given[give]) - ticks(l, given[take]);
            for (i64 m = first; m < end; m++) {
                i64 mine = l->holder_replica[m], j = l->owner[mine];
                if (j == i) continue;
                for (i64 back = l->replica_start[j]; back < l->replica_start[j + 1]; back++) {
                    if (l->replica_rank[back] != other || given[back] == 0) continue;
                    i64 a = here + ticks(l, given[mine] + given[back]) - ticks(l, given[mine]);
                    i64 b = there - ticks(l, given[back]), peak = a > b ? a : b;
                    if (peak < best.peak) best = (Move){peak, give, take, given[give], back, mine, given[back]};
                }
            }
        }
    }
    return best;
}

static void give_rows(const Layer *l, i64 *load, i64 *given, i64 c, i64 change) {
    load[l->replica_rank[c]] += ticks(l, given[c] + change) - ticks(l, given[c]);
    given[c] += change;
}

/* Moves tokens off the busiest rank while that helps and the bound is not reached. Returns the largest time. */
static i64 shorten(const Layer *l, i64 *load, i64 *given, i64 bound) {
    i64 num_moves = l->num_ranks + 2 * l->replica_start[l->num_replicated];
    for (;; num_moves--) {
        i64 rank = 0;
        for (i64 r = 1; r < l->num_ranks; r++)
            if (load[r] > load[rank]) rank = r;
        if (load[rank] <= bound || num_moves == 0) return load[rank];
        Move best = best_move(l, load, given, rank);
        if (best.give < 0) best = best_exchange(l, load, given, rank);
        if (best.give < 0) return load[rank];
        give_rows(l, load, given, best.give, -best.amount);
        give_rows(l, load, given, best.take, best.amount);
        if (best.returned) {
            give_rows(l, load, given, best.back, -best.returned);
            give_rows(l, load, given, best.mine, best.returned);
        }
    }
}

/* Replaces the exact split given[C] of tokens by the split by time. load, cut, search: scratch [R], [R], [4 * R];
   rest: [E + R + 2 * C + num_replicated]. Returns whether it is proven. */
static int split_by_time(const Layer *l, const i64 *totals, i64 *given, i64 *load, i64 *cut, i64 *search, i64 *rest) {
    i64 num_replicas = l->replica_start[l->num_replicated], num_cut, num_pushes;
    i64 *times = rest, *whole = times + l->num_logical, *levelled = whole + num_replicas;
    i64 *whole_load = levelled + num_replicas, *order = whole_load + l->num_ranks;
    for (i64 e = 0; e < l->num_logical; e++) times[e] = ticks(l, totals[e]);
    memset(load, 0, sizeof(i64) * l->num_ranks);
    for (i64 i = 0; i < l->num_fixed; i++) load[l->fixed_rank[i]] += times[l->fixed_expert[i]];
    memcpy(whole_load, load, sizeof(i64) * l->num_ranks);
    for (i64 c = 0; c < num_replicas; c++) {
        load[l->replica_rank[c]] += ticks(l, given[c]);
        whole[c] = levelled[c] = 0;
    }
    for (i64 i = 0; i < l->num_replicated; i++) {
        i64 at = i;
        for (; at > 0 && totals[l->experts[order[at - 1]]] < totals[l->experts[i]]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    for (i64 k = 0; k < l->num_replicated && totals[l->experts[order[k]]]; k++) {
        i64 i = order[k], first = l->replica_start[i];
        for (i64 c = first; c < l->replica_start[i + 1]; c++)
            if (whole_load[l->replica_rank[c]] < whole_load[l->replica_rank[first]]) first = c;
        whole[first] = totals[l->experts[i]];
        levelled[first] = times[l->experts[i]];
        whole_load[l->replica_rank[first]] += times[l->experts[i]];
    }
    i64 *level = order; /* [R], no longer needed */
    memcpy(level, whole_load, sizeof(i64) * l->num_ranks);
    i64 bound = level_loads(l, level, levelled, cut, &num_cut, &num_pushes, search);
    int is_bound = is_proven(l, times, level, cut, num_cut, search);
    i64 most = shorten(l, whole_load, whole, bound);
    if (most > bound) {
        i64 other = shorten(l, load, given, bound);
        if (other < most) return is_bound && other == bound;
    }
    memcpy(given, whole, sizeof(i64) * num_replicas);
    return is_bound && most == bound;
}

static void split_exactly(const Layer *l, const i64 *counts, i64 num_sources, i64 *rows) {
    i64 num_ranks = l->num_ranks, num_logical = l->num_logical, num_replicas = l->replica_start[l->num_replicated];
    i64 *totals = l->scratch, *by_slot = totals + num_logical, *given = by_slot + l->num_slots;
    i64 *load = given + num_replicas, *cut = load + num_ranks, *search = cut + num_ranks, *rest = search + 4 * num_ranks;
    i64 *tokens_of = rest, num_cut, num_pushes;
    memset(l->scratch, 0, sizeof(i64) * (cut - l->scratch));
    for (i64 s = 0; s < num_sources; s++)
        for (i64 e = 0; e < num_logical; e++) totals[e] += counts[s * num_logical + e];
    if (num_sources > 1) /* begin with what is near: all reaches but the last */
        share_in_turn(l, l->num_reaches - 1, counts, num_sources, l->num_replicated, l->experts, l->replica_start,
                      l->replica_slot, by_slot, 0, rest);
    for (i64 i = 0; i < l->num_fixed; i++) load[l->fixed_rank[i]] += totals[l->fixed_expert[i]];
    for (i64 i = 0; i < l->num_replicated; i++) tokens_of[i] = totals[l->experts[i]];
    for (i64 c = 0; c < num_replicas; c++) {
        given[c] = by_slot[l->replica_slot[c]];
        load[l->replica_rank[c]] += given[c];
        tokens_of[l->owner[c]] -= given[c];
    }
    if (num_sources > 1)
        water_fill(l, tokens_of, load, given, tokens_of + l->num_replicated);
    else {
        share_evenly(l, tokens_of, load, given);
        level_forest(l, load, given);
    }
    level_loads(l, load, given, cut, &num_cut, &num_pushes, search);
    if (l->tile_rows)
        l->outcomes[split_by_time(l, totals, given, load, cut, search, rest) ? 0 : 2]++;
    else
        l->outcomes[is_proven(l, totals, load, cut, num_cut, search) ? num_pushes > 0 : 2]++;
    for (i64 s = 0; s < num_sources; s++)
        for (i64 i = 0; i < l->num_fixed; i++)
            rows[s * l->num_slots + l->fixed_slot[i]] = counts[s * num_logical + l->fixed_expert[i]];
    if (num_sources > 1)
        send_short(l, counts, given, rows, search);
    else
        for (i64 c = 0; c < num_replicas; c++) rows[l->replica_slot[c]] = given[c];
}

/* counts [S, E] -> rows [S, P] */
void split_counts(const Layer *l, const i64 *counts, i64 num_sources, i64 *rows) {
    memset(rows, 0, sizeof(i64) * num_sources * l->num_slots);
    if (l->is_exact)
        split_exactly(l, counts, num_sources, rows);
    else
        share_in_turn(l, l->num_reaches, counts, num_sources, l->num_logical, 0, l->slot_start, l->slots, rows,
                      l->num_slots, l->scratch);
}

/* The same for one source, between the buffers that the layer names. */
void split_totals(const Layer *l) { split_counts(l, l->totals, 1, l->total_rows); }

/* counts [R, E] -> rows [R, P], and the slot of each of this rank's ids (-1 stays -1): an expert's tokens, in order,
   fill its slots in order */
void split_and_assign(const Layer *l, const i64 *counts, i64 rank, const i64 *ids, i64 num_ids, i64 *rows, i64 *physical) {
    split_counts(l, counts, l->num_ranks, rows);
    i64 *left = l->scratch, *at = left + l->num_slots;
    memcpy(left, rows + rank * l->num_slots, sizeof(i64) * l->num_slots);
    memcpy(at, l->slot_start, sizeof(i64) * l->num_logical);
    for (i64 i = 0; i < num_ids; i++) {
        physical[i] = -1;
        if (ids[i] < 0) continue;
        i64 *next = at + ids[i];
        while (left[l->slots[*next]] == 0 && *next + 1 < l->slot_start[ids[i] + 1]) ++*next;
        physical[i] = l->slots[*next];
        left[physical[i]]--;
    }
}

/* counts [E]: how many of ids name each expert */
void count_ids(const i64 *ids, i64 num_ids, i64 num_logical, i64 *counts) {
    memset(counts, 0, sizeof(i64) * num_logical);
    for (i64 i = 0; i < num_ids; i++)
        if (ids[i] >= 0) counts[ids[i]]++;
}
