/* The row work of the shared-memory transport: the same results as PlainLaneWork in lane_work.py, bit for bit.

   Built at first use by lane_work_native.py for the machine it runs on; never required. All sizes are int64. A "lane
   table" holds the addresses of one buffer: for each rank 8 words, see LANE below. Shape words as in send_plan.py. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

/* What never changes, in words: see NativeLaneWork. Lane tables follow, one for each buffer. */
enum { RANK, NUM_RANKS, SLOTS, ROW_BYTES, HOME_ROW_BYTES, HIDDEN, IS_BF16, STREAM_BYTES, SLAB_ROWS, FACTS };
enum { OUT_HEAD, OUT_ENTRIES, OUT_ROWS, OUT_HOME, IN_HEAD, IN_ENTRIES, IN_ROWS, IN_HOME, LANE_WORDS };
#define LANE(table, rank, field) ((void *)(table)[(rank) * LANE_WORDS + (field)])
#define TAKES_PART(others, rank) (((others) >> (rank)) & 1)

static const i64 *lane_table(const i64 *facts, i64 buffer)
{
    return facts + FACTS + buffer * facts[NUM_RANKS] * LANE_WORDS;
}

enum { AHEAD = 1024 }; /* bytes: a page ends what the processor fetches on its own, and rows begin anywhere */

/* Streaming stores do not read what they overwrite; they pay off where the data exceed what a core keeps in its cache. */
static void copy_row(uint8_t *to, const uint8_t *from, i64 size, int stream)
{
    if (!stream) {
        memcpy(to, from, size);
        return;
    }
#ifdef __AVX512F__
    for (i64 i = 0; i < size; i += 64) {
        _mm_prefetch((const char *)from + i + AHEAD, _MM_HINT_T0);
        _mm512_stream_si512((void *)(to + i), _mm512_loadu_si512(from + i));
    }
#else
    for (i64 i = 0; i < size; i += 16)
        _mm_stream_si128((void *)(to + i), _mm_loadu_si128((const void *)(from + i)));
#endif
}

static int may_stream(const void *to, i64 row_bytes, i64 num_rows, i64 stream_bytes)
{
    return ((uintptr_t)to | (uintptr_t)row_bytes) % 64 == 0 && row_bytes * num_rows >= stream_bytes;
}

/* The yardstick of benchmarks/dispatch.py: one copy that bypasses the caches. */
void stream_copy(uint8_t *to, const uint8_t *from, i64 size)
{
    copy_row(to, from, size, 1);
    _mm_sfence();
}

/* block: counts [P] | first_entry [R + 1] | first_token [R + 1] | home [T * K] | row [T * K] | tokens [T * min(R, K)] */
static void plan_sends(const i64 *ids, i64 num_tokens, i64 topk, i64 num_ranks, i64 slots_per_rank, i64 *block)
{
    i64 num_slots = num_ranks * slots_per_rank, num_pairs = num_tokens * topk;
    i64 *counts = block, *first_entry = counts + num_slots, *first_token = first_entry + num_ranks + 1;
    i64 *home = first_token + num_ranks + 1, *row = home + num_pairs, *tokens = row + num_pairs;
    i64 next[num_slots], rank_of[num_slots], seen[num_ranks], number[num_ranks];

    memset(counts, 0, num_slots * sizeof(i64));
    memset(first_token, 0, (num_ranks + 1) * sizeof(i64));
    for (i64 rank = 0, slot = 0; rank < num_ranks; rank++) {
        seen[rank] = -1;
        for (i64 i = 0; i < slots_per_rank; i++)
            rank_of[slot++] = rank;
    }
    for (i64 pair = 0, token = 0; token < num_tokens; token++)
        for (i64 k = 0; k < topk; k++, pair++)
            if (ids[pair] >= 0) {
                i64 rank = rank_of[ids[pair]];
                counts[ids[pair]]++;
                if (seen[rank] != token) {
                    seen[rank] = token;
                    first_token[rank + 1]++;
                }
            }
    i64 sum = 0;
    for (i64 slot = 0; slot < num_slots; slot++) {
        if (slot % slots_per_rank == 0)
            first_entry[slot / slots_per_rank] = sum;
        next[slot] = sum;
        sum += counts[slot];
    }
    first_entry[num_ranks] = sum;
    for (i64 rank = 0; rank < num_ranks; rank++) {
        first_token[rank + 1] += first_token[rank];
        seen[rank] = number[rank] = -1;
    }
    for (i64 pair = 0, token = 0; token < num_tokens; token++)
        for (i64 k = 0; k < topk; k++, pair++) {
            if (ids[pair] < 0) {
                home[pair] = -1;
                continue;
            }
            i64 rank = rank_of[ids[pair]];
            if (seen[rank] != token) {
                seen[rank] = token;
                number[rank]++;
                tokens[first_token[rank] + number[rank]] = token;
            }
            i64 entry = next[ids[pair]]++;
            home[pair] = entry;
            row[entry] = number[rank];
        }
}

/* Plans, then writes rows, and which of them each slot gets, into the lanes of the others. */
void send_rows(const i64 *facts, i64 buffer, i64 others, const i64 *ids, i64 num_tokens, i64 topk,
               const uint8_t *data, i64 *block)
{
    i64 num_ranks = facts[NUM_RANKS], slots_per_rank = facts[SLOTS], row_bytes = facts[ROW_BYTES];
    const i64 *table = lane_table(facts, buffer), *counts = block, *first_entry = counts + num_ranks * slots_per_rank;
    const i64 *first_token = first_entry + num_ranks + 1, *row = first_token + num_ranks + 1 + num_tokens * topk;
    const i64 *tokens = row + num_tokens * topk;
    plan_sends(ids, num_tokens, topk, num_ranks, slots_per_rank, block);
    for (i64 peer = 0; peer < num_ranks; peer++) {
        if (!TAKES_PART(others, peer))
            continue;
        i64 *head = LANE(table, peer, OUT_HEAD);
        int32_t *entries = LANE(table, peer, OUT_ENTRIES);
        uint8_t *rows = LANE(table, peer, OUT_ROWS);
        i64 num_rows = first_token[peer + 1] - first_token[peer];
        int stream = may_stream(rows, row_bytes, num_rows, facts[STREAM_BYTES]);
        memcpy(head, counts + peer * slots_per_rank, slots_per_rank * sizeof(i64));
        head[slots_per_rank] = num_rows;
        for (i64 entry = first_entry[peer]; entry < first_entry[peer + 1]; entry++)
            *entries++ = (int32_t)row[entry];
        for (i64 i = 0; i < num_rows; i++)
            copy_row(rows + i * row_bytes, data + tokens[first_token[peer] + i] * row_bytes, row_bytes, stream);
    }
    _mm_sfence();
}

/* heads: counts [R, S] | first [R + 1] | per_slot [S]: entries that have arrived. Returns their number. */
i64 read_heads(const i64 *facts, i64 buffer, i64 others, const i64 *block, i64 *heads)
{
    i64 num_ranks = facts[NUM_RANKS], slots_per_rank = facts[SLOTS], rank = facts[RANK];
    const i64 *table = lane_table(facts, buffer);
    i64 *counts = heads, *first = counts + num_ranks * slots_per_rank, *per_slot = first + num_ranks + 1;
    memset(per_slot, 0, slots_per_rank * sizeof(i64));
    first[0] = 0;
    for (i64 source = 0; source < num_ranks; source++) {
        const i64 *head = source == rank ? block + rank * slots_per_rank : LANE(table, source, IN_HEAD);
        i64 takes_part = source == rank || TAKES_PART(others, source), sum = 0;
        for (i64 slot = 0; slot < slots_per_rank; slot++) {
            i64 count = takes_part ? head[slot] : 0;
            counts[source * slots_per_rank + slot] = count;
            per_slot[slot] += count;
            sum += count;
        }
        first[source + 1] = first[source] + sum;
    }
    return first[num_ranks];
}

/* pieces [R]: addresses of decoded rows, or NULL where they lie in the lanes as they are needed; own: this rank's.
   placed [M]: where each entry went, in arrival order. */
void place_rows(const i64 *facts, i64 buffer, const i64 *block, i64 num_pairs, const i64 *heads, const i64 *pieces,
                const uint8_t *own, i64 *placed, uint8_t *out, i64 row_bytes)
{
    i64 num_ranks = facts[NUM_RANKS], slots_per_rank = facts[SLOTS], rank = facts[RANK], at = 0;
    const i64 *table = lane_table(facts, buffer), *first_entry = block + num_ranks * slots_per_rank;
    const i64 *first_token = first_entry + num_ranks + 1, *row = first_token + num_ranks + 1 + num_pairs;
    const i64 *own_row = row + first_entry[rank], *own_tokens = row + num_pairs + first_token[rank];
    const i64 *counts = heads, *first = counts + num_ranks * slots_per_rank;
    int stream = may_stream(out, row_bytes, first[num_ranks], facts[STREAM_BYTES]);
    i64 done[num_ranks];
    memset(done, 0, sizeof done);
    /* In the order of the result, so that its memory is written from front to back. */
    for (i64 slot = 0; slot < slots_per_rank; slot++) {
        if (facts[SLAB_ROWS])
            at = slot * facts[SLAB_ROWS];
        for (i64 source = 0; source < num_ranks; source++) {
            const int32_t *entries = LANE(table, source, IN_ENTRIES);
            const uint8_t *piece = pieces ? (const uint8_t *)pieces[source]
                                   : source == rank ? own : LANE(table, source, IN_ROWS);
            for (i64 i = 0; i < counts[source * slots_per_rank + slot]; i++, at++) {
                i64 entry = done[source]++;
                i64 from = source == rank ? own_tokens[own_row[entry]] : entries[entry];
                placed[first[source] + entry] = at;
                copy_row(out + at * row_bytes, piece + from * row_bytes, row_bytes, stream);
            }
        }
    }
    _mm_sfence();
}

/* Writes results into the lanes of their homes, in arrival order. */
void send_results(const i64 *facts, i64 buffer, i64 others, const i64 *heads, const i64 *placed, const uint8_t *data)
{
    i64 num_ranks = facts[NUM_RANKS], row_bytes = facts[HOME_ROW_BYTES];
    const i64 *table = lane_table(facts, buffer), *first = heads + num_ranks * facts[SLOTS];
    for (i64 peer = 0; peer < num_ranks; peer++) {
        if (!TAKES_PART(others, peer))
            continue;
        uint8_t *rows = LANE(table, peer, OUT_HOME);
        i64 num_rows = first[peer + 1] - first[peer];
        int stream = may_stream(rows, row_bytes, num_rows, facts[STREAM_BYTES]);
        for (i64 i = 0; i < num_rows; i++)
            copy_row(rows + i * row_bytes, data + placed[first[peer] + i] * row_bytes, row_bytes, stream);
    }
    _mm_sfence();
}

typedef float vf __attribute__((vector_size(64), aligned(4)));
typedef uint32_t vu __attribute__((vector_size(64), aligned(4)));
typedef uint16_t vh __attribute__((vector_size(32), aligned(2)));
enum { WIDTH = 16, BLOCK = 64 };

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

/* Each step is one fused multiply-add in float32, in the order of k, from zero. */
static void add_rows_bf16(const uint16_t **rows, const float *weights, i64 num, i64 hidden, uint16_t *out)
{
    i64 h = 0;
    for (; h + BLOCK <= hidden; h += BLOCK) {
        vf sum[4] = {{0}, {0}, {0}, {0}};
        for (i64 k = 0; k < num; k++) {
            _mm_prefetch((const char *)(rows[k] + h) + AHEAD, _MM_HINT_T0);
            _mm_prefetch((const char *)(rows[k] + h) + AHEAD + 64, _MM_HINT_T0);
            for (int j = 0; j < 4; j++) {
                vh half = *(const vh *)(rows[k] + h + j * WIDTH);
                sum[j] += (vf)(__builtin_convertvector(half, vu) << 16) * weights[k];
            }
        }
        for (int j = 0; j < 4; j++) {
            vu bits = (vu)sum[j];
            vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            vu nan = (vu)(sum[j] != sum[j]);
            *(vh *)(out + h + j * WIDTH) = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), vh);
        }
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

/* pieces [R]: addresses of decoded results, or NULL as above; own: this rank's, in the placed layout. */
void add_results(const i64 *facts, i64 buffer, const i64 *block, i64 num_tokens, i64 topk, const i64 *heads,
                 const i64 *placed, const i64 *pieces, const uint8_t *own, const float *weights, uint8_t *out)
{
    i64 num_ranks = facts[NUM_RANKS], slots_per_rank = facts[SLOTS], rank = facts[RANK], hidden = facts[HIDDEN];
    const i64 *table = lane_table(facts, buffer), *first_entry = block + num_ranks * slots_per_rank;
    const i64 *home = first_entry + 2 * (num_ranks + 1);
    const i64 *own_placed = placed + heads[num_ranks * slots_per_rank + rank];
    i64 row_bytes = hidden * (facts[IS_BF16] ? 2 : 4);
    const void *rows[topk];
    float scale[topk];
    for (i64 token = 0; token < num_tokens; token++) {
        i64 num = 0;
        for (i64 k = 0; k < topk; k++) {
            i64 entry = home[token * topk + k], source = 0;
            if (entry < 0)
                continue;
            while (entry >= first_entry[source + 1])
                source++;
            i64 row = entry - first_entry[source];
            const uint8_t *piece = pieces ? (const uint8_t *)pieces[source]
                                   : source == rank ? own : LANE(table, source, IN_HOME);
            rows[num] = piece + (source == rank ? own_placed[row] : row) * row_bytes;
            scale[num++] = weights[token * topk + k];
        }
        if (facts[IS_BF16])
            add_rows_bf16((const uint16_t **)rows, scale, num, hidden, (uint16_t *)(out + token * row_bytes));
        else
            add_rows_f32((const float **)rows, scale, num, hidden, (float *)(out + token * row_bytes));
    }
}
