/* The row work of the shared-memory transport: the same results as PlainLaneWork in lane_work.py, bit for bit.

   Built at first use by lane_work_native.py for the machine it runs on; never required. All sizes are int64. A "lane
   table" holds addresses of one buffer: for each rank 8 words, see LANE below. Shape words as in send_plan.py. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

enum { OUT_HEAD, OUT_ENTRIES, OUT_ROWS, OUT_HOME, IN_HEAD, IN_ENTRIES, IN_ROWS, IN_HOME, LANE_WORDS };
#define LANE(table, rank, field) ((void *)(table)[(rank) * LANE_WORDS + (field)])
#define TAKES_PART(others, rank) (((others) >> (rank)) & 1)

/* Streaming stores do not read what they overwrite; they pay off where the data exceed what a core keeps in its cache. */
static void copy_row(uint8_t *to, const uint8_t *from, i64 size, int stream)
{
    if (!stream) {
        memcpy(to, from, size);
        return;
    }
#ifdef __AVX512F__
    for (i64 i = 0; i < size; i += 64)
        _mm512_stream_si512((void *)(to + i), _mm512_loadu_si512(from + i));
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
void plan_sends(const i64 *ids, i64 num_tokens, i64 topk, i64 num_ranks, i64 slots_per_rank, i64 *block)
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

void push_rows(const i64 *table, i64 num_ranks, i64 slots_per_rank, i64 others, const i64 *counts,
               const i64 *first_entry, const i64 *first_token, const i64 *row, const i64 *tokens,
               const uint8_t *data, i64 row_bytes, i64 stream_bytes)
{
    for (i64 peer = 0; peer < num_ranks; peer++) {
        if (!TAKES_PART(others, peer))
            continue;
        i64 *head = LANE(table, peer, OUT_HEAD);
        int32_t *entries = LANE(table, peer, OUT_ENTRIES);
        uint8_t *rows = LANE(table, peer, OUT_ROWS);
        i64 num_rows = first_token[peer + 1] - first_token[peer];
        int stream = may_stream(rows, row_bytes, num_rows, stream_bytes);
        memcpy(head, counts + peer * slots_per_rank, slots_per_rank * sizeof(i64));
        head[slots_per_rank] = num_rows;
        for (i64 entry = first_entry[peer]; entry < first_entry[peer + 1]; entry++)
            *entries++ = (int32_t)row[entry];
        for (i64 i = 0; i < num_rows; i++)
            copy_row(rows + i * row_bytes, data + tokens[first_token[peer] + i] * row_bytes, row_bytes, stream);
    }
    _mm_sfence();
}

/* counts [R, S], first [R + 1]: entries that have arrived from each source; per_slot [S] their sum. */
void read_heads(const i64 *table, i64 rank, i64 num_ranks, i64 slots_per_rank, i64 others, const i64 *own_counts,
                i64 *counts, i64 *first, i64 *per_slot)
{
    memset(per_slot, 0, slots_per_rank * sizeof(i64));
    first[0] = 0;
    for (i64 source = 0; source < num_ranks; source++) {
        const i64 *head = source == rank ? own_counts + rank * slots_per_rank : LANE(table, source, IN_HEAD);
        i64 sum = 0;
        for (i64 slot = 0; slot < slots_per_rank; slot++) {
            i64 count = source == rank || TAKES_PART(others, source) ? head[slot] : 0;
            counts[source * slots_per_rank + slot] = count;
            per_slot[slot] += count;
            sum += count;
        }
        first[source + 1] = first[source] + sum;
    }
}

/* pieces [R]: addresses of decoded rows; placed [M]: where each entry goes, in arrival order. */
void place_rows(const i64 *table, i64 rank, i64 num_ranks, i64 slots_per_rank, const i64 *counts, const i64 *pieces,
                const i64 *own_row, const i64 *own_tokens, i64 *placed, uint8_t *out, i64 row_bytes, i64 num_rows,
                i64 stream_bytes)
{
    i64 next[num_ranks], at = 0, base = 0;
    int stream = may_stream(out, row_bytes, num_rows, stream_bytes);
    for (i64 source = 0; source < num_ranks; source++) {
        next[source] = base;
        for (i64 slot = 0; slot < slots_per_rank; slot++)
            base += counts[source * slots_per_rank + slot];
    }
    /* In the order of the result, so that its memory is written from front to back. */
    i64 done[num_ranks];
    memset(done, 0, sizeof done);
    for (i64 slot = 0; slot < slots_per_rank; slot++)
        for (i64 source = 0; source < num_ranks; source++) {
            const int32_t *entries = LANE(table, source, IN_ENTRIES);
            const uint8_t *piece = (const uint8_t *)pieces[source];
            for (i64 i = 0; i < counts[source * slots_per_rank + slot]; i++, at++) {
                i64 entry = done[source]++;
                i64 row = source == rank ? own_tokens[own_row[entry]] : entries[entry];
                placed[next[source] + entry] = at;
                copy_row(out + at * row_bytes, piece + row * row_bytes, row_bytes, stream);
            }
        }
    _mm_sfence();
}

void push_results(const i64 *table, i64 num_ranks, i64 others, const i64 *first, const i64 *placed,
                  const uint8_t *data, i64 row_bytes, i64 stream_bytes)
{
    for (i64 peer = 0; peer < num_ranks; peer++) {
        if (!TAKES_PART(others, peer))
            continue;
        uint8_t *rows = LANE(table, peer, OUT_HOME);
        i64 num_rows = first[peer + 1] - first[peer];
        int stream = may_stream(rows, row_bytes, num_rows, stream_bytes);
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
        for (i64 k = 0; k < num; k++)
            for (int j = 0; j < 4; j++) {
                vh half = *(const vh *)(rows[k] + h + j * WIDTH);
                sum[j] += (vf)(__builtin_convertvector(half, vu) << 16) * weights[k];
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

/* pieces [R]: addresses of decoded results; own ones lie where own_placed says. bf16: else float32. */
void weighted_sum(i64 rank, i64 num_tokens, i64 topk, i64 hidden, i64 bf16, const i64 *pieces,
                  const i64 *first_entry, const i64 *own_placed, const i64 *home, const float *weights, uint8_t *out)
{
    i64 row_bytes = hidden * (bf16 ? 2 : 4);
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
            if (source == rank)
                row = own_placed[row];
            rows[num] = (const uint8_t *)pieces[source] + row * row_bytes;
            scale[num++] = weights[token * topk + k];
        }
        if (bf16)
            add_rows_bf16((const uint16_t **)rows, scale, num, hidden, (uint16_t *)(out + token * row_bytes));
        else
            add_rows_f32((const float **)rows, scale, num, hidden, (float *)(out + token * row_bytes));
    }
}
