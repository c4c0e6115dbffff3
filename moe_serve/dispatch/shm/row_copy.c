/* The row work of the shared-memory transport: the same results as PlainLaneWork in row_copy_plain.py, bit for bit.

   Built at first use by row_copy_native.py for the machine it runs on; never required. All sizes are int64. A "lane
   table" holds the addresses of one buffer: for each rank LANE_WORDS words. Shape words as in send_plan.py. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

/* What never changes, in words: see NativeLaneWork. Lane tables follow, one for each buffer. */
enum { RANK, NUM_RANKS, SLOTS, ROW_BYTES, HOME_ROW_BYTES, HIDDEN, IS_BF16, CACHED_BYTES, SLAB_ROWS, RANK_SUM,
       MAX_TOPK, MAX_RESULTS, FACTS };
enum { OUT_HEAD, OUT_ENTRIES, OUT_WEIGHTS, OUT_ROWS, OUT_STARTS,
       IN_HEAD, IN_ENTRIES, IN_WEIGHTS, IN_ROWS, IN_STARTS, OUTBOX, LANE_WORDS };
#define LANE(table, rank, field) ((void *)(table)[(rank) * LANE_WORDS + (field)])
#define TAKES_PART(others, rank) (((others) >> (rank)) & 1)
enum { FIRST = 1 << 30 }; /* in an entry: a new row begins */

static const i64 *lane_table(const i64 *facts, i64 buffer)
{
    return facts + FACTS + buffer * facts[NUM_RANKS] * LANE_WORDS;
}

/* What one dispatch leaves behind, in one block of words. */
typedef struct {
    /* of what arrived here: */
    i64 *per_slot; /* [S] */
    i64 *rows_of;  /* [R]        rows of each source */
    i64 *arrived;  /* [R, S]     entries of each source for each slot */
    i64 *starts;   /* [R, S]     where they begin in the packed order */
    /* of what this rank sent: */
    i64 *counts;   /* [P]        entries for each slot */
    i64 *num_rows; /* [R]        rows for each rank */
    i64 *tokens;   /* [R, T]     which */
    i64 *home;     /* [T, K]     the how many-th entry of this rank for its slot each pair is, -1 = not sent */
    /* with rank_sum, of each entry that arrived, by source, then row: */
    i64 *placed;   /* [M]        row of x, + FIRST where a row begins */
    float *weight; /* [M] */
} Trip;

static Trip trip_at(const i64 *facts, i64 *block, i64 num_tokens, i64 topk)
{
    i64 num_ranks = facts[NUM_RANKS], slots = facts[SLOTS];
    Trip trip;
    trip.per_slot = block;
    trip.rows_of = trip.per_slot + slots;
    trip.arrived = trip.rows_of + num_ranks;
    trip.starts = trip.arrived + num_ranks * slots;
    trip.counts = trip.starts + num_ranks * slots;
    trip.num_rows = trip.counts + num_ranks * slots;
    trip.tokens = trip.num_rows + num_ranks;
    trip.home = trip.tokens + num_ranks * num_tokens;
    trip.placed = trip.home + num_tokens * topk;
    trip.weight = (float *)(trip.placed + facts[MAX_RESULTS]);
    return trip;
}

/* Rows are written in two ways. The first CACHED_BYTES of an area are written through the caches, where the next reader
   finds them; what lies beyond is streamed past them, which does not read what it overwrites. Both ways at once are
   faster than either: they have limits of their own. */
#ifdef __AVX512F__
#define WORDS 64
#define LOAD(from) _mm512_loadu_si512(from)
#define STORE(to, words) _mm512_storeu_si512((void *)(to), words)
#define STREAM(to, words) _mm512_stream_si512((void *)(to), words)
typedef __m512i Words;
#else
#define WORDS 16
#define LOAD(from) _mm_loadu_si128((const __m128i *)(from))
#define STORE(to, words) _mm_storeu_si128((__m128i *)(to), words)
#define STREAM(to, words) _mm_stream_si128((__m128i *)(to), words)
typedef __m128i Words;
#endif

/* Writes one row to up to two cached and two streamed places; the numbers are constants where it is called. */
static inline __attribute__((always_inline)) void spread(uint8_t *const *cached, int num_cached, uint8_t *const *streamed,
                                                         int num_streamed, const uint8_t *from, i64 size)
{
    for (i64 i = 0; i < size; i += WORDS) {
        Words words = LOAD(from + i);
        for (int n = 0; n < num_cached; n++)
            STORE(cached[n] + i, words);
        for (int n = 0; n < num_streamed; n++)
            STREAM(streamed[n] + i, words);
    }
}

/* Writes one row to several places of an area while it is at hand. */
static void spread_row(uint8_t **to, i64 num, const uint8_t *from, i64 size, const uint8_t *area, i64 cached_bytes)
{
    uint8_t *cached[num + 1], *streamed[num + 1], **c = cached, **s = streamed;
    i64 num_cached = 0, num_streamed = 0;
    if (((uintptr_t)area | (uintptr_t)size) % 64 != 0) {
        for (i64 n = 0; n < num; n++)
            memcpy(to[n], from, size);
        return;
    }
    for (i64 n = 0; n < num; n++)
        if (to[n] - area < cached_bytes)
            cached[num_cached++] = to[n];
        else
            streamed[num_streamed++] = to[n];
    while (num_cached > 0 || num_streamed > 0) {
        int of_cached = num_cached < 2 ? num_cached : 2, of_streamed = num_streamed < 2 ? num_streamed : 2;
        switch (3 * of_cached + of_streamed) {
        case 1: spread(c, 0, s, 1, from, size); break;
        case 2: spread(c, 0, s, 2, from, size); break;
        case 3: spread(c, 1, s, 0, from, size); break;
        case 4: spread(c, 1, s, 1, from, size); break;
        case 5: spread(c, 1, s, 2, from, size); break;
        case 6: spread(c, 2, s, 0, from, size); break;
        case 7: spread(c, 2, s, 1, from, size); break;
        case 8: spread(c, 2, s, 2, from, size); break;
        }
        c += of_cached, num_cached -= of_cached;
        s += of_streamed, num_streamed -= of_streamed;
    }
}

/* The yardstick of benchmarks/dispatch.py: one copy that bypasses the caches. */
void stream_copy(uint8_t *to, const uint8_t *from, i64 size)
{
    spread(NULL, 0, &to, 1, from, size);
    _mm_sfence();
}

/* Plans, and writes what each slot gets, and rows, into the lanes of the others; what this rank's own slots get, into
   its own lane. weights [T, K], or NULL. Returns -1 where an id names no slot. */
i64 send_rows(const i64 *facts, i64 buffer, i64 others, const i64 *ids, i64 num_tokens, i64 topk,
              const uint8_t *data, const float *weights, i64 *block)
{
    i64 num_ranks = facts[NUM_RANKS], slots = facts[SLOTS], row_bytes = facts[ROW_BYTES], rank = facts[RANK];
    i64 num_slots = num_ranks * slots;
    const i64 *table = lane_table(facts, buffer);
    Trip trip = trip_at(facts, block, num_tokens, topk);
    int32_t *entries[num_ranks];
    float *entry_weights[num_ranks];
    i64 seen[num_ranks], done[num_ranks], rank_of[num_slots];
    for (i64 r = 0, slot = 0; r < num_ranks; r++) {
        entries[r] = LANE(table, r, OUT_ENTRIES);
        entry_weights[r] = LANE(table, r, OUT_WEIGHTS);
        seen[r] = -1;
        trip.num_rows[r] = done[r] = 0;
        for (i64 i = 0; i < slots; i++)
            rank_of[slot++] = r;
    }
    memset(trip.counts, 0, num_slots * sizeof(i64));
    for (i64 pair = 0, token = 0; token < num_tokens; token++)
        for (i64 k = 0; k < topk; k++, pair++) {
            i64 id = ids[pair];
            if (id < 0) {
                trip.home[pair] = -1;
                continue;
            }
            if (id >= num_slots)
                return -1;
            i64 r = rank_of[id];
            int32_t entry = (int32_t)(id - r * slots);
            trip.home[pair] = trip.counts[id]++;
            if (seen[r] != token) {
                seen[r] = token;
                entry |= FIRST;
                trip.tokens[r * num_tokens + trip.num_rows[r]++] = token;
            }
            *entries[r]++ = entry;
            if (weights)
                *entry_weights[r]++ = weights[pair];
        }
    for (i64 r = 0; r < num_ranks; r++)
        if (r == rank || TAKES_PART(others, r)) {
            i64 *head = LANE(table, r, OUT_HEAD);
            memcpy(head, trip.counts + r * slots, slots * sizeof(i64));
            head[slots] = trip.num_rows[r];
        }
    for (i64 token = 0; token < num_tokens; token++)
        for (i64 r = 0; r < num_ranks; r++) {
            if (!TAKES_PART(others, r) || done[r] == trip.num_rows[r] || trip.tokens[r * num_tokens + done[r]] != token)
                continue;
            memcpy((uint8_t *)LANE(table, r, OUT_ROWS) + done[r]++ * row_bytes, data + token * row_bytes, row_bytes);
        }
    _mm_sfence();
    return 0;
}

/* Where entries of each source for each slot go: arrived, starts, per_slot, rows_of. Returns their number. */
static i64 read_heads(const i64 *facts, const i64 *table, i64 others, Trip trip)
{
    i64 num_ranks = facts[NUM_RANKS], slots = facts[SLOTS], rank = facts[RANK], sum = 0;
    for (i64 source = 0; source < num_ranks; source++) {
        const i64 *head = LANE(table, source, IN_HEAD);
        int takes_part = source == rank || TAKES_PART(others, source);
        for (i64 slot = 0; slot < slots; slot++)
            trip.arrived[source * slots + slot] = takes_part ? head[slot] : 0;
        trip.rows_of[source] = takes_part ? head[slots] : 0;
    }
    for (i64 slot = 0; slot < slots; slot++) {
        i64 before = sum;
        for (i64 source = 0; source < num_ranks; source++) {
            trip.starts[source * slots + slot] = sum;
            sum += trip.arrived[source * slots + slot];
        }
        trip.per_slot[slot] = sum - before;
    }
    return sum;
}

/* Where the first row of a source for a slot lies in x. */
static i64 placed_start(const i64 *facts, Trip trip, i64 source, i64 slot)
{
    i64 start = trip.starts[source * facts[SLOTS] + slot];
    return facts[SLAB_ROWS] ? slot * facts[SLAB_ROWS] + start - trip.starts[slot] : start;
}

/* Puts a row for each entry that arrived in the placed layout, and returns the number of all, or -1 where a slab is too
   small. pieces [R]: addresses of decoded rows, or NULL where they lie in the lanes as they are needed; own: this
   rank's */
i64 place_rows(const i64 *facts, i64 buffer, i64 others, i64 num_tokens, i64 topk, const i64 *pieces, const uint8_t *own,
               i64 row_bytes, uint8_t *out, i64 *block)
{
    i64 num_ranks = facts[NUM_RANKS], slots = facts[SLOTS], rank = facts[RANK], at = 0;
    const i64 *table = lane_table(facts, buffer);
    Trip trip = trip_at(facts, block, num_tokens, topk);
    i64 total = read_heads(facts, table, others, trip);
    for (i64 slot = 0; facts[SLAB_ROWS] && slot < slots; slot++)
        if (trip.per_slot[slot] > facts[SLAB_ROWS])
            return -1;
    for (i64 source = 0; source < num_ranks; source++) {
        const int32_t *entries = LANE(table, source, IN_ENTRIES);
        const float *weights = LANE(table, source, IN_WEIGHTS);
        const uint8_t *piece = pieces ? (const uint8_t *)pieces[source]
                               : source == rank ? own : LANE(table, source, IN_ROWS);
        i64 next[slots], num_entries = 0;
        for (i64 slot = 0; slot < slots; slot++) {
            next[slot] = placed_start(facts, trip, source, slot);
            num_entries += trip.arrived[source * slots + slot];
        }
        for (i64 entry = 0, row = 0; entry < num_entries; row++) {
            uint8_t *to[facts[MAX_TOPK] + 1];
            i64 num = 0;
            do {
                i64 slot = entries[entry] & (FIRST - 1), placed = next[slot]++;
                if (facts[RANK_SUM]) {
                    trip.placed[at] = entries[entry] & FIRST ? placed | FIRST : placed;
                    trip.weight[at++] = weights[entry];
                }
                to[num++] = out + placed * row_bytes;
                entry++;
            } while (entry < num_entries && !(entries[entry] & FIRST));
            i64 from = source == rank ? trip.tokens[rank * num_tokens + row] : row;
            spread_row(to, num, piece + from * row_bytes, row_bytes, out, facts[CACHED_BYTES]);
        }
    }
    _mm_sfence();
    return total;
}

/* Makes results ready in the outbox, unless they are there, and tells each home where its own begin. */
void send_results(const i64 *facts, i64 buffer, i64 others, i64 num_tokens, i64 topk, i64 in_place,
                  const uint8_t *data, i64 *block)
{
    i64 num_ranks = facts[NUM_RANKS], slots = facts[SLOTS], row_bytes = facts[HOME_ROW_BYTES], first_row = 0;
    const i64 *table = lane_table(facts, buffer);
    Trip trip = trip_at(facts, block, num_tokens, topk);
    uint8_t *outbox = LANE(table, facts[RANK], OUTBOX);
    for (i64 peer = 0; peer < num_ranks; first_row += trip.rows_of[peer++]) {
        if (!TAKES_PART(others, peer))
            continue;
        i64 *starts = LANE(table, peer, OUT_STARTS);
        memcpy(starts, trip.starts + peer * slots, slots * sizeof(i64));
        if (facts[RANK_SUM])
            starts[0] = first_row;
        for (i64 slot = 0; slot < slots && !in_place; slot++)
            if (trip.arrived[peer * slots + slot]) /* with no rows at all there may be no address either */
                memcpy(outbox + trip.starts[peer * slots + slot] * row_bytes,
                       data + placed_start(facts, trip, peer, slot) * row_bytes,
                       trip.arrived[peer * slots + slot] * row_bytes);
    }
    _mm_sfence();
}

typedef float vf __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(2)));
enum { WIDTH = 16, BLOCK = 4 * WIDTH, BLOCK_BF16 = 8 * WIDTH };

static inline float widen(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t narrow(float value) /* to nearest, ties to even; one NaN */
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline vu round_bf16(vf sum) /* as narrow, in the upper half of each word */
{
    vu bits = (vu)sum, nan = (vu)(sum != sum);
    return ((bits + 0x7fff + ((bits >> 16) & 1)) & ~nan) | (nan & 0x7fc00000);
}

/* Each step is one fused multiply-add in float32, in the order of k, from zero. A word holds two values: the lower one is
   shifted up, the upper one is masked, which costs less than to widen each half. */
static void add_rows_bf16(const uint16_t **rows, const float *weights, i64 num, i64 hidden, uint16_t *out)
{
    i64 h = 0;
    for (; h + BLOCK_BF16 <= hidden; h += BLOCK_BF16) {
        vf low[4] = {{0}, {0}, {0}, {0}}, high[4] = {{0}, {0}, {0}, {0}};
        for (i64 k = 0; k < num; k++)
            for (int j = 0; j < 4; j++) {
                vu words = *(const vu *)(rows[k] + h + j * 2 * WIDTH);
                low[j] += (vf)(words << 16) * weights[k];
                high[j] += (vf)(words & 0xffff0000) * weights[k];
            }
        for (int j = 0; j < 4; j++)
            *(vu *)(out + h + j * 2 * WIDTH) = (round_bf16(low[j]) >> 16) | (round_bf16(high[j]) & 0xffff0000);
    }
    for (; h < hidden; h++) {
        float sum = 0;
        for (i64 k = 0; k < num; k++)
            sum = __builtin_fmaf(weights[k], widen(rows[k][h]), sum);
        out[h] = narrow(sum);
    }
}

static void add_rows_f32(const float **rows, const float *weights, i64 num, i64 hidden, float *out)
{
    i64 h = 0;
    for (; h + BLOCK <= hidden; h += BLOCK) {
        vf sum[4] = {{0}, {0}, {0}, {0}};
        for (i64 k = 0; k < num; k++)
            for (int j = 0; j < 4; j++)
                sum[j] += *(const vf *)(rows[k] + h + j * WIDTH) * weights[k];
        for (int j = 0; j < 4; j++)
            *(vf *)(out + h + j * WIDTH) = sum[j];
    }
    for (; h < hidden; h++) {
        float sum = 0;
        for (i64 k = 0; k < num; k++)
            sum = __builtin_fmaf(weights[k], rows[k][h], sum);
        out[h] = sum;
    }
}

/* out [num_tokens, hidden]: for each token, the weighted sum of `num` rows */
static void add_rows(const i64 *facts, const void **rows, const float *weights, i64 num, void *out)
{
    if (facts[IS_BF16])
        add_rows_bf16((const uint16_t **)rows, weights, num, facts[HIDDEN], out);
    else
        add_rows_f32((const float **)rows, weights, num, facts[HIDDEN], out);
}

/* rows [T, K] int64 of `from` [.., hidden], -1 = nothing to add: the form that is held against the reference. */
void weighted_rows(const i64 *facts, const i64 *rows, const float *weights, i64 num_tokens, i64 topk,
                   const uint8_t *from, uint8_t *out)
{
    i64 row_bytes = facts[HIDDEN] * (facts[IS_BF16] ? 2 : 4);
    const void *at[topk + 1];
    float scale[topk + 1];
    for (i64 token = 0; token < num_tokens; token++) {
        i64 num = 0;
        for (i64 pair = token * topk; pair < (token + 1) * topk; pair++)
            if (rows[pair] >= 0) {
                at[num] = from + rows[pair] * row_bytes;
                scale[num++] = weights[pair];
            }
        add_rows(facts, at, scale, num, out + token * row_bytes);
    }
}

/* rank_sum, where the experts are: the weighted sum of each arrived row's results here, by source, then row. */
void sum_results(const i64 *facts, i64 num_tokens, i64 topk, const uint8_t *data, uint8_t *out, i64 *block)
{
    i64 row_bytes = facts[HIDDEN] * (facts[IS_BF16] ? 2 : 4), num_entries = 0;
    Trip trip = trip_at(facts, block, num_tokens, topk);
    for (i64 i = 0; i < facts[NUM_RANKS] * facts[SLOTS]; i++)
        num_entries += trip.arrived[i];
    for (i64 entry = 0; entry < num_entries; out += row_bytes) {
        const void *rows[facts[MAX_TOPK] + 1];
        i64 first = entry;
        do {
            rows[entry - first] = data + (trip.placed[entry] & ~(i64)FIRST) * row_bytes;
            entry++;
        } while (entry < num_entries && !(trip.placed[entry] & FIRST));
        add_rows(facts, rows, trip.weight + first, entry - first, out);
    }
}

/* Adds each token's results, read where they lie: own ones in `own`, in the placed layout, others in their outboxes. */
void add_results(const i64 *facts, i64 buffer, i64 others, const i64 *ids, i64 num_tokens, i64 topk,
                 const uint8_t *own, const float *weights, uint8_t *out, i64 *block)
{
    i64 num_ranks = facts[NUM_RANKS], slots = facts[SLOTS], rank = facts[RANK], most = topk > num_ranks ? topk : num_ranks;
    i64 row_bytes = facts[HIDDEN] * (facts[IS_BF16] ? 2 : 4), own_first = 0;
    const i64 *table = lane_table(facts, buffer);
    Trip trip = trip_at(facts, block, num_tokens, topk);
    const uint8_t *first[num_ranks * slots]; /* of each slot, where this rank's results begin */
    i64 next[num_ranks];
    const void *rows[most + 1];
    float scale[most + 1];
    for (i64 source = 0; source < rank; source++)
        own_first += trip.rows_of[source];
    for (i64 source = 0; source < num_ranks; source++) {
        next[source] = 0;
        if (source != rank && !TAKES_PART(others, source))
            continue; /* nothing was sent there, and nothing is read */
        const i64 *starts = LANE(table, source, IN_STARTS);
        const uint8_t *from = LANE(table, source, OUTBOX);
        if (facts[RANK_SUM])
            first[source] = from + (source == rank ? own_first : starts[0]) * row_bytes;
        else
            for (i64 slot = 0; slot < slots; slot++)
                first[source * slots + slot] = source == rank ? own + placed_start(facts, trip, rank, slot) * row_bytes
                                                              : from + starts[slot] * row_bytes;
    }
    for (i64 token = 0; token < num_tokens; token++) {
        i64 num = 0;
        if (facts[RANK_SUM]) {
            for (i64 source = 0; source < num_ranks; source++)
                if (next[source] < trip.num_rows[source] &&
                    trip.tokens[source * num_tokens + next[source]] == token) {
                    rows[num] = first[source] + next[source]++ * row_bytes;
                    scale[num++] = 1;
                }
        } else {
            for (i64 pair = token * topk; pair < (token + 1) * topk; pair++)
                if (trip.home[pair] >= 0) {
                    rows[num] = first[ids[pair]] + trip.home[pair] * row_bytes;
                    scale[num++] = weights[pair];
                }
        }
        add_rows(facts, rows, scale, num, out + token * row_bytes);
    }
}
