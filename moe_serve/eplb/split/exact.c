/* split_exact.py in C, step by step: same order, same ties, equal results. See there for the method.
   Counts of one batch sum to at most 2^53 (the caller checks), so only the product in the water level needs 128 bits. */
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

typedef struct {
    i64 num_ranks, num_slots, num_homes, num_replicated, num_live;
    const i64 *home_expert, *home_slot, *home_rank; /* [num_homes]: experts that live on one rank */
    const i64 *experts, *copy_start;                /* [num_replicated], [num_replicated + 1] */
    const i64 *copy_rank, *copy_slot, *owner;       /* [num_copies] */
    const i64 *holder_start, *holder_copy;          /* [num_ranks + 1], [num_copies] */
    const i64 *live;                                /* [num_live]: ranks that have a slot in use */
} Graph;

static i64 ceil_div(i64 a, i64 b) { return a / b + (a % b > 0); }

static void water_fill(const Graph *g, const i64 *tokens_of, i64 *load, i64 *given, i64 *order) {
    i64 n = g->num_replicated;
    for (i64 i = 0; i < n; i++) { /* stable insertion sort, most tokens first */
        i64 tokens = tokens_of[i], at = i;
        for (; at > 0 && tokens_of[order[at - 1]] < tokens; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    for (i64 k = 0; k < n; k++) {
        i64 i = order[k], tokens = tokens_of[i], first = g->copy_start[i], end = g->copy_start[i + 1];
        if (tokens == 0) break;
        if (end - first == 2) {
            i64 a = g->copy_rank[first], b = g->copy_rank[first + 1];
            i64 to_a = (tokens + load[b] - load[a] + 1) >> 1;
            if (to_a < 0) to_a = 0;
            if (to_a > tokens) to_a = tokens;
            given[first] += to_a;
            given[first + 1] += tokens - to_a;
            load[a] += to_a;
            load[b] += tokens - to_a;
            continue;
        }
        i64 *by_load = order + n, m = end - first; /* room behind the n indices */
        for (i64 j = 0; j < m; j++) {
            i64 c = first + j, at = j;
            for (; at > 0 && load[g->copy_rank[by_load[at - 1]]] > load[g->copy_rank[c]]; at--)
                by_load[at] = by_load[at - 1];
            by_load[at] = c;
        }
        i64 below = 0, num_filled = 0;
        for (i64 j = 0; j < m; j++) {
            i64 height = load[g->copy_rank[by_load[j]]];
            if ((__int128)num_filled * height - below >= tokens) break;
            below += height;
            num_filled++;
        }
        i64 level = (tokens + below) / num_filled, extra = (tokens + below) % num_filled;
        for (i64 j = 0; j < num_filled; j++) {
            i64 rank = g->copy_rank[by_load[j]];
            i64 amount = level + (j < extra) - load[rank];
            given[by_load[j]] += amount;
            load[rank] += amount;
        }
    }
}

/* counts [E]; start [num_copies] or NULL; out: given [num_copies], load [num_ranks], slot_tokens [num_slots] or NULL,
   cut [num_ranks] (its members first, unordered) and num_cut; scratch: 2 * num_replicated + num_copies + 4 * num_ranks.
   Returns the largest load. */
i64 moe_serve_split_exact(const Graph *g, const i64 *counts, const i64 *start, i64 *given, i64 *load, i64 *slot_tokens,
                          i64 *cut, i64 *num_cut, i64 *scratch) {
    i64 num_ranks = g->num_ranks, num_copies = g->copy_start[g->num_replicated], total = 0;
    i64 *via_give = scratch, *via_take = via_give + num_ranks, *queue = via_take + num_ranks, *seen = queue + num_ranks;
    memset(load, 0, sizeof(i64) * num_ranks);
    for (i64 i = 0; i < g->num_homes; i++) load[g->home_rank[i]] += counts[g->home_expert[i]];
    i64 *tokens_of = seen + num_ranks;
    for (i64 i = 0; i < g->num_replicated; i++) tokens_of[i] = counts[g->experts[i]];
    for (i64 c = 0; c < num_copies; c++) {
        given[c] = start ? start[c] : 0;
        load[g->copy_rank[c]] += given[c];
        tokens_of[g->owner[c]] -= given[c];
    }
    water_fill(g, tokens_of, load, given, tokens_of + g->num_replicated);
    for (i64 r = 0; r < num_ranks; r++) total += load[r];
    memcpy(cut, g->live, sizeof(i64) * g->num_live);
    *num_cut = g->num_live;
    i64 bound = ceil_div(total, g->num_live);
    for (;;) {
        i64 source = 0, target = -1, head = 0, tail = 0;
        for (i64 r = 1; r < num_ranks; r++)
            if (load[r] > load[source]) source = r;
        if (load[source] <= bound) break;
        memset(seen, 0, sizeof(i64) * num_ranks);
        seen[source] = 1;
        queue[tail++] = source;
        while (head < tail && target < 0) {
            i64 rank = queue[head++];
            for (i64 h = g->holder_start[rank]; h < g->holder_start[rank + 1] && target < 0; h++) {
                i64 give = g->holder_copy[h], i = g->owner[give];
                if (given[give] == 0) continue;
                for (i64 take = g->copy_start[i]; take < g->copy_start[i + 1]; take++) {
                    i64 other = g->copy_rank[take];
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
        i64 amount = load[source] - bound, room = bound - load[target];
        if (room < amount) amount = room;
        for (i64 r = target; r != source; r = g->copy_rank[via_give[r]])
            if (given[via_give[r]] < amount) amount = given[via_give[r]];
        load[source] -= amount;
        load[target] += amount;
        for (i64 r = target; r != source; r = g->copy_rank[via_give[r]]) {
            given[via_give[r]] -= amount;
            given[via_take[r]] += amount;
        }
    }
    if (slot_tokens) {
        memset(slot_tokens, 0, sizeof(i64) * g->num_slots);
        for (i64 i = 0; i < g->num_homes; i++) slot_tokens[g->home_slot[i]] = counts[g->home_expert[i]];
        for (i64 c = 0; c < num_copies; c++) slot_tokens[g->copy_slot[c]] = given[c];
    }
    return bound;
}
