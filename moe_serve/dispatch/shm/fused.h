/* Rows to their slots, through a function of the caller and back, in one call. It waits for a few milliseconds; where a
   peer is later it returns which wait it is at, Python waits (channel.py), and the call is made again, from there on. */

#pragma once
#include "row_copy.h"
#include "wait.h"

enum { SEND_ROWS, PLACE_ROWS, EXPERTS, ADD_RESULTS, HOME }; /* stages, as in ep/fused.py; each begins with a wait */
enum { DATA_ROWS, DATA_RESULTS, READ_ROWS, READ_RESULTS, FLAG_WORDS };
enum { ROWS_COLUMN = 2, RESULTS_COLUMN = 4, ROWS_READ_COLUMN = 7 }; /* as in region.py */

typedef i64 (*ExpertFfn)(i64 experts, i64 x, i64 x_row, i64 rows_per_slot, i64 slab_rows, i64 middle, i64 y, i64 y_row);

typedef i64 (*TurnPart)(i64 clock, i64 part);

/* Calls of hosts/link.c towards the ranks of other hosts, as remote.py fills it. */
typedef struct {
    i64 link, space, flags_at; /* flags_at: of this rank's flags in each region */
    i64 (*rows)(i64 link, i64 to, i64 space, const i64 *facts, i64 buffer, i64 others, i64 num_tokens, i64 topk,
                const uint8_t *rows, i64 *block, i64 flag_offset, i64 flag);
    i64 (*results)(i64 link, i64 to, i64 space, i64 peer, const i64 *facts, i64 buffer, i64 num_tokens, i64 topk,
                   i64 *block, i64 flag_offset, i64 flag);
    i64 (*later)(i64 link, i64 to, i64 space, i64 others, i64 flag_offset, i64 flag);
    i64 num_hosts;
    struct { i64 entry, ranks; } hosts[]; /* who takes in what goes to a host; who takes part there, as bits */
} Remote;

typedef struct { /* as ep/fused.py fills it */
    i64 rows_flag, results_flag; /* of the calls of this layer */
    i64 rows_before, results_before; /* of the calls that used their buffers before, or 0 */
    i64 others, stage;
    const Remote *remote; /* NULL: all ranks are on this host */
    const i64 *facts;
    i64 *block; /* of Exchange */
    uint8_t *staging;
    ExpertFfn expert_ffn;
    Waits *waits;
    TurnPart turn_part; /* kernels/cpu/part_clock.c: a part has the waits that it begins with */
    i64 clock, experts_part, combine_part;
    i64 here[]; /* for each rank, addresses of its flags here, then of this rank's flags there: of each buffer */
} Fused;

static i64 *flag_of(const Fused *t, i64 there, i64 rank, i64 word, i64 buffer)
{
    i64 ranks = t->facts[NUM_RANKS];
    return (i64 *)t->here[((there * 2 + buffer) * ranks + rank) * FLAG_WORDS + word];
}

static int all_flags_are(const Fused *t, i64 word, i64 buffer, i64 wanted, int or_more)
{
    for (i64 rank = 0; rank < t->facts[NUM_RANKS]; rank++)
        if (TAKES_PART(t->others, rank) && !wait_for(t->waits, rank, flag_of(t, 0, rank, word, buffer), wanted, or_more))
            return 0;
    return 1;
}

/* Raises the flags of this host. A rank that waited has its core back at once: workers see it before they begin the next
   piece. */
static void raise_flags(const Fused *t, i64 word, i64 buffer, i64 flag)
{
    uint32_t *const *core_of = t->waits->core_of;
    for (i64 rank = 0; rank < t->facts[NUM_RANKS]; rank++)
        if (TAKES_PART(t->others & t->facts[LOCAL], rank)) {
            __atomic_store_n(flag_of(t, 1, rank, word, buffer), flag, __ATOMIC_RELEASE);
            if (core_of)
                take_back_core(core_of[rank]);
        }
}

static i64 remote_flag(const Remote *remote, i64 column) { return remote->flags_at + column * (i64)sizeof(i64); }

static void send_rows_to_hosts(const Fused *t, i64 buffer, const uint8_t *x, i64 num_tokens, i64 topk)
{
    const Remote *r = t->remote;
    for (i64 host = 0; r && host < r->num_hosts; host++)
        r->rows(r->link, r->hosts[host].entry, r->space, t->facts, buffer, r->hosts[host].ranks, num_tokens, topk, x,
                t->block, remote_flag(r, ROWS_COLUMN + buffer), t->rows_flag);
}

/* These go with the next that is sent. */
static void acknowledge_rows_to_hosts(const Fused *t)
{
    const Remote *r = t->remote;
    for (i64 host = 0; r && host < r->num_hosts; host++)
        r->later(r->link, r->hosts[host].entry, r->space, r->hosts[host].ranks, remote_flag(r, ROWS_READ_COLUMN),
                 t->rows_flag);
}

static void send_results_to_hosts(const Fused *t, i64 buffer, i64 num_tokens, i64 topk)
{
    const Remote *r = t->remote;
    for (i64 rank = 0; r && rank < t->facts[NUM_RANKS]; rank++)
        if (TAKES_PART(t->others & ~t->facts[LOCAL], rank))
            r->results(r->link, rank, r->space, rank, t->facts, buffer, num_tokens, topk, t->block,
                       remote_flag(r, RESULTS_COLUMN + buffer), t->results_flag);
}

static int wait_at(Fused *t, i64 stage, i64 buffer)
{
    t->stage = stage;
    switch (stage) {
    case SEND_ROWS: return all_flags_are(t, READ_ROWS, buffer, t->rows_before, 1);
    case PLACE_ROWS: return all_flags_are(t, DATA_ROWS, buffer, t->rows_flag, 0);
    case EXPERTS: return all_flags_are(t, READ_RESULTS, buffer, t->results_before, 1);
    default: return all_flags_are(t, DATA_RESULTS, buffer, t->results_flag, 0);
    }
}

/* Returns HOME when out [T, H] holds the sums, else the stage to wait for; -1 where an id names no slot. The caller
   acknowledges the results, once it has seen that its epoch stands. Results of all peers tell that all have x's rows. experts, middle: as in kernels/cpu/experts.c */
i64 fused(Fused *t, const uint8_t *x, const i64 *ids, const float *weights, i64 num_tokens, i64 topk, i64 experts,
           i64 middle, uint8_t *out)
{
    const i64 *facts = t->facts;
    i64 rows = t->rows_flag % 2, results = t->results_flag % 2, hidden = facts[HIDDEN];
    uint8_t *made = SLICE(slice_table(facts, results), facts[RANK], SEND_BUFFER);
    switch (t->stage) {
    case SEND_ROWS:
        if (!wait_at(t, SEND_ROWS, rows))
            return SEND_ROWS;
        if (send_rows(facts, rows, t->others, ids, num_tokens, topk, x, 0, t->block) < 0)
            return -1;
        raise_flags(t, DATA_ROWS, rows, t->rows_flag);
        send_rows_to_hosts(t, rows, x, num_tokens, topk); /* fall through */
    case PLACE_ROWS:
        if (!wait_at(t, PLACE_ROWS, rows))
            return PLACE_ROWS;
        place_rows(facts, rows, t->others, num_tokens, topk, 0, x, facts[ROW_BYTES], t->staging, t->block);
        raise_flags(t, READ_ROWS, rows, t->rows_flag);
        acknowledge_rows_to_hosts(t); /* fall through */
    case EXPERTS: /* write where the peers read */
        if (!wait_at(t, EXPERTS, results))
            return EXPERTS;
        t->turn_part(t->clock, t->experts_part);
        t->expert_ffn(experts, (i64)t->staging, hidden, (i64)t->block, 0, middle, (i64)made, hidden);
        t->turn_part(t->clock, t->combine_part);
        send_results(facts, results, t->others, num_tokens, topk, 1, made, t->block);
        raise_flags(t, DATA_RESULTS, results, t->results_flag);
        send_results_to_hosts(t, results, num_tokens, topk); /* fall through */
    default:
        if (!wait_at(t, ADD_RESULTS, results))
            return ADD_RESULTS;
        add_results(facts, results, t->others, ids, num_tokens, topk, made, weights, out, t->block);
    }
    return HOME;
}
