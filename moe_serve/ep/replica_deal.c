/* How replicas share a batch, as in replica_map.py: the same integers, in one pass. All sizes are int64. Shape words:
   R ranks, E experts, P slots, M most replicas; tables as in LayerReplicas. */

#include <stdint.h>

typedef int64_t i64;

/* counts [E]: how many of ids name each expert */
void count_ids(const i64 *ids, i64 num_ids, i64 num_logical, i64 *counts)
{
    for (i64 expert = 0; expert < num_logical; expert++)
        counts[expert] = 0;
    for (i64 i = 0; i < num_ids; i++)
        if (ids[i] >= 0)
            counts[ids[i]]++;
}

/* facts: R, E, P, M, layer row, rank, and the addresses of slots [E + 1, M], count [E + 1], logical [P], ordinal [P].
   counts [R, E]; physical: slot of each id; slot_counts [R, P]; next [E]: scratch */
void deal_evenly(const i64 *facts, const i64 *ids, i64 num_ids, const i64 *counts, i64 *physical, i64 *slot_counts,
                 i64 *next)
{
    i64 num_ranks = facts[0], num_logical = facts[1], num_slots = facts[2], most = facts[3], row = facts[4];
    const i64 *slots = (const i64 *)facts[6], *count = (const i64 *)facts[7];
    const i64 *logical = (const i64 *)facts[8], *ordinal = (const i64 *)facts[9];
    i64 before[num_logical];
    for (i64 expert = 0; expert < num_logical; expert++)
        before[expert] = 0;
    for (i64 rank = 0; rank < num_ranks; rank++) {
        if (rank == facts[5])
            for (i64 expert = 0; expert < num_logical; expert++)
                next[expert] = count[expert] == 1 ? 0 : (before[expert] + expert + row) % count[expert];
        for (i64 slot = 0; slot < num_slots; slot++) {
            i64 expert = logical[slot], dealt = 0;
            if (expert < num_logical) {
                i64 replicas = count[expert], tokens = counts[rank * num_logical + expert];
                dealt = tokens;
                if (replicas > 1) {
                    i64 shift = (ordinal[slot] - expert - row) % replicas;
                    i64 phase = replicas - 1 - (shift < 0 ? shift + replicas : shift);
                    dealt = (before[expert] + tokens + phase) / replicas - (before[expert] + phase) / replicas;
                }
            }
            slot_counts[rank * num_slots + slot] = dealt;
        }
        for (i64 expert = 0; expert < num_logical; expert++)
            before[expert] += counts[rank * num_logical + expert];
    }
    for (i64 i = 0; i < num_ids; i++) {
        i64 expert = ids[i];
        if (expert < 0) {
            physical[i] = -1;
            continue;
        }
        physical[i] = slots[expert * most + next[expert]];
        if (++next[expert] >= count[expert])
            next[expert] = 0;
    }
}

/* An expert's tokens, in order, fill its slots in order, each to its share. shares [P]: tokens of this rank that each
   slot takes; left [P], at [E]: scratch */
void fill_shares(const i64 *facts, const i64 *ids, i64 num_ids, const i64 *shares, i64 *physical, i64 *left, i64 *at)
{
    i64 num_logical = facts[1], num_slots = facts[2], most = facts[3];
    const i64 *slots = (const i64 *)facts[6], *count = (const i64 *)facts[7];
    for (i64 expert = 0; expert < num_logical; expert++)
        at[expert] = 0;
    for (i64 slot = 0; slot < num_slots; slot++)
        left[slot] = shares[slot];
    for (i64 i = 0; i < num_ids; i++) {
        i64 expert = ids[i];
        if (expert < 0) {
            physical[i] = -1;
            continue;
        }
        const i64 *of_expert = slots + expert * most;
        while (left[of_expert[at[expert]]] == 0 && at[expert] + 1 < count[expert])
            at[expert]++;
        physical[i] = of_expert[at[expert]];
        left[physical[i]]--;
    }
}
