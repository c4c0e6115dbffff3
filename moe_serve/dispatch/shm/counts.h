/* The exchange of counts, [n] of each rank -> [R, n] of all, with its flags. */

#pragma once
#include <immintrin.h>
#include <string.h>
#include "row_copy.h"

/* As made in counts.py: rank, number of ranks; then of each buffer and rank these addresses. */
enum { COUNTS_OUT, FLAG_OUT, READ_OUT, COUNTS_IN, FLAG_IN, READ_IN, COUNT_WORDS };

static const i64 *addresses(const i64 *facts, i64 buffer, i64 rank)
{
    return facts + 2 + (buffer * facts[1] + rank) * COUNT_WORDS;
}

static i64 load_flag(i64 at) { return __atomic_load_n((const i64 *)at, __ATOMIC_ACQUIRE); }
static void store_flag(i64 at, i64 flag) { __atomic_store_n((i64 *)at, flag, __ATOMIC_RELEASE); }

/* Writes this rank's counts to its row of all, and to the others, then the flag. Rows of the others are 0 until they
   come. Returns -1, and does nothing, unless all others have read what the flag `before` announced. */
i64 send_counts(const i64 *facts, i64 buffer, i64 others, i64 before, i64 flag, const i64 *counts, i64 num, i64 *all)
{
    i64 rank = facts[0], num_ranks = facts[1];
    for (i64 peer = 0; peer < num_ranks; peer++)
        if (TAKES_PART(others, peer) && load_flag(addresses(facts, buffer, peer)[READ_IN]) < before)
            return -1;
    memset(all, 0, num_ranks * num * sizeof(i64));
    memcpy(all + rank * num, counts, num * sizeof(i64));
    for (i64 peer = 0; peer < num_ranks; peer++)
        if (TAKES_PART(others, peer)) {
            const i64 *at = addresses(facts, buffer, peer);
            memcpy((void *)at[COUNTS_OUT], counts, num * sizeof(i64));
            store_flag(at[FLAG_OUT], flag);
        }
    return 0;
}

/* Reads the counts of the others and acknowledges them. Returns -1 when they are not all here after so many looks. */
i64 receive_counts(const i64 *facts, i64 buffer, i64 others, i64 flag, i64 num, i64 *all, i64 looks)
{
    i64 num_ranks = facts[1];
    for (i64 peer = 0; peer < num_ranks; peer++)
        if (TAKES_PART(others, peer))
            while (load_flag(addresses(facts, buffer, peer)[FLAG_IN]) != flag) {
                if (--looks < 0)
                    return -1;
                _mm_pause();
            }
    for (i64 peer = 0; peer < num_ranks; peer++)
        if (TAKES_PART(others, peer)) {
            const i64 *at = addresses(facts, buffer, peer);
            memcpy(all + peer * num, (void *)at[COUNTS_IN], num * sizeof(i64));
            store_flag(at[READ_OUT], flag);
        }
    return 0;
}
