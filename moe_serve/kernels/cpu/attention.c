/* Attention over the paged cache as it lies, for decode rows and for chunks of a prefill.

   A row is one query head of one token. Rows of one sequence and key/value head form blocks; a block goes through the
   keys in tiles of 64 tokens, which begin at multiples of 64, with the online softmax (arXiv:2205.14135). What a row
   computes in a tile depends on its own query and on the keys up to its own position, so its bits do not depend on the
   block that it is in: chunks, neighbours and threads change nothing. Keys that a row does not see never enter it, not
   even times zero, which would let in NaN; tiles that lie before a sliding window are skipped. A sink is a score of each
   query head that stands for no key: rows begin with it as their maximum.

   Keys and values in 8 bits are widened to float32 tile by tile, exactly but for the product with their scale; the bits
   are those of a cache that holds these products. */
#include <stdlib.h>
#include "attention_tile.h"
#include "cached.h"
#include "pool.h"

enum { AHEAD = 16 };                  /* keys fetched ahead */
enum { ROOM = 384 << 10, NEAR = 20 << 10 }; /* bytes of a block's rows, which stay in L2, and of keys kept in L1 */
enum { COPY_FROM = 4 };               /* tiles of rows for which a copy of a tile of keys pays */

typedef struct { /* AttendRows.facts in attention.py */
    i64 num_seqs, num_rows, heads, group, width, value_width;
    i64 value_at, head_step; /* elements from a key to its value, and to the next head's key */
    i64 slot_step;           /* floats to the next slot, where it is not in 8 bits */
    i64 block_size, table_step, table_width;
    const i64 *positions;    /* [T] */
    const i32 *query_starts; /* [num_seqs + 1] */
    const i32 *block_tables; /* [num_seqs, table_width] */
    i64 *piece_starts;       /* [num_seqs + 1], written by attend_plan; one piece is one call of attend_piece */
    double scale;
} Attend;

typedef struct {
    const Attend *step;
    const float *q;
    i64 q_step; /* floats from token to token */
    const float *cache;
    float *out;
    i64 window;         /* keys that a row sees, its own included; 0 = all before it */
    const float *sinks; /* [heads, group], or 0 */
    i64 chunk;          /* a row sees keys from the last multiple of it on; 0 = from the first */
    CachedForm form;
    _Atomic i64 *failed;
} Job;

/* Scores of one tile of keys, `count` of which exist. A few keys at a time stay in L1 while all rows pass. */
static void score_tile(const Block *b, const float *const *key, const float *const *value, i64 first, i64 count)
{
    i64 some = least(NEAR / (b->width * 4) / 4 * 4, KEYS);
    if (some < 4) some = 4;
    for (i64 start = 0; start < count; start += some) {
        i64 end = least(start + some, count), fetched = start;
        for (i64 tile = 0; tile < b->tiles; tile++) {
            if (!sees(b, tile, first + start, first + end)) continue;
            for (i64 k = start; k < end; k += 4) {
                for (; fetched <= k + 3; fetched++) /* the first tile of rows fetches for all */
                    for (i64 d = 0; d < b->width; d += 16) {
                        __builtin_prefetch(key[fetched + AHEAD] + d, 0, 3);
                        if (d < b->value_width && value[0] != key[0]) __builtin_prefetch(value[fetched] + d, 0, 2);
                    }
                score(b->q + tile * ROWS * b->width, b->width, key + k, b->p + tile * ROWS * KEYS + k);
            }
        }
    }
}

static void score_tile_turned(const Block *b, i64 first, i64 count)
{
    for (i64 start = 0; start < count; start += TURNED)
        for (i64 tile = 0; tile < b->tiles; tile++)
            if (sees(b, tile, first + start, first + start + TURNED))
                score_turned(b->q + tile * ROWS * b->width, b->width, b->turned + start * b->width,
                             b->p + tile * ROWS * KEYS + start);
}

/* The addresses of keys first .. first + KEYS + AHEAD; the last one again where there are no more. */
static void find_keys(const Attend *a, i64 seq, const float *head, i64 first, i64 total, const float **key)
{
    const i32 *table = a->block_tables + seq * a->table_step;
    i64 end = least(KEYS + AHEAD, total - first), block = first / a->block_size, offset = first % a->block_size, j = 0;
    for (; j < end; block++, offset = 0) {
        const float *slot = head + (table[block] * a->block_size + offset) * a->slot_step;
        for (; j < end && offset < a->block_size; j++, offset++, slot += a->slot_step) key[j] = slot;
    }
    for (; j < KEYS + AHEAD; j++) key[j] = key[end - 1];
}

/* Copies a tile: keys as columns, values as rows. Fetches what it copies soon. */
static void copy_tile(const Attend *a, const Block *b, const float *const *key, const float **value, i64 count)
{
    for (i64 j = 0; j < KEYS; j += 4) {
        for (i64 i = j + AHEAD - 4; i < j + AHEAD; i++) {
            for (i64 d = 0; d < a->width; d += 16) __builtin_prefetch(key[i] + d, 0, 3);
            for (i64 d = 0; d < a->value_width; d += 16) __builtin_prefetch(key[i] + a->value_at + d, 0, 3);
        }
        turn4(key + j, a->width, b->turned + j / TURNED * TURNED * b->width + j % TURNED);
        for (i64 row = j; row < least(j + 4, count); row++) {
            float *to = b->values + row * b->value_width;
            const float *from_row = value[row];
            BY_REGISTER(a->value_width, put(to + i, j, get(from_row + i, j, count), 16);)
            value[row] = to;
        }
    }
}

/* Widens a tile of keys in 8 bits, and their values, and says where they are. */
static void widen_tile(const Job *job, const Block *b, i64 seq, i64 head, i64 first, i64 count, const float **key,
                       const float **value)
{
    const Attend *a = job->step;
    const CachedForm *form = &job->form;
    const i32 *table = a->block_tables + seq * a->table_step;
    const char *cache = (const char *)job->cache + head * a->head_step;
    i64 rest = a->width - a->value_width; /* of a latent's row, with a scale of its own */
    for (i64 j = 0; j < count; j++) {
        i64 at = first + j, slot = table[at / a->block_size] * a->block_size + at % a->block_size;
        const char *from = cache + slot * form->slot_step;
        const float *scales = form->scales + slot * form->scale_step;
        float *to = b->wide + j * b->width;
        key[j] = value[j] = to;
        if (a->value_at) {
            float *value_to = b->wide + KEYS * b->width + j * b->value_width;
            widen_cached(form->kind, from, a->width, scales[head], to);
            widen_cached(form->kind, from + a->value_at, a->value_width, scales[a->heads + head], value_to);
            value[j] = value_to;
        } else {
            widen_cached(form->kind, from, a->value_width, scales[0], to);
            if (rest) { /* behind a latent that need not end at a multiple of 16 */
                float tail[(rest + 15) / 16 * 16];
                widen_cached(form->kind, from + a->value_width, rest, scales[1], tail);
                memcpy(to + a->value_width, tail, rest * 4);
                memset(to + a->width, 0, (b->width - a->width) * 4);
            }
        }
    }
    for (i64 j = count; j < KEYS + AHEAD; j++) key[j] = key[count - 1], value[j] = value[count - 1];
}

/* Fetches all of a tile into the second cache, beside what score_tile fetches a few keys ahead: AMD's processors read
   keys that lie apart 1.3 times as fast then. */
static void fetch_tile(const Block *b, const float *const *key, const float *const *value, i64 count)
{
    for (i64 j = 0; j < count; j++) /* keys and values by turns: one after the other they gain a fifth of it */
        for (i64 d = 0; d < b->width; d += 16) {
            __builtin_prefetch(key[j] + d, 0, 2);
            __builtin_prefetch(value[j] + d, 0, 2);
        }
}

static void attend_block(const Job *job, Block *b, i64 seq, i64 head_number)
{
    const Attend *a = job->step;
    const float *head = job->cache + head_number * a->head_step;
    i64 total = b->seen[b->tiles * ROWS - 1];
    for (i64 first = b->from[0] / KEYS * KEYS; first < total; first += KEYS) {
        const float *key[KEYS + AHEAD], *value[KEYS + AHEAD];
        i64 count = least(total - first, KEYS);
        if (b->wide) widen_tile(job, b, seq, head_number, first, count, key, value);
        else {
            find_keys(a, seq, head, first, total, key);
            for (int j = 0; j < KEYS + AHEAD; j++) value[j] = key[j] + a->value_at;
            if (is_amd) fetch_tile(b, key, value, count);
        }
        if (b->turned) {
            copy_tile(a, b, key, value, count);
            score_tile_turned(b, first, count);
        } else score_tile(b, key, value, first, count);
        for (i64 row = 0; row < b->rows; row++)
            if (b->seen[row] > first && b->from[row] < first + KEYS)
                soften(b, row, from_tile(b->from[row], first), least(b->seen[row] - first, KEYS));
        weigh(b, value, first);
    }
}

/* A thread's working memory, kept for the next piece. */
static _Thread_local struct {
    char *at;
    i64 bytes;
} attend_room;

/* Returns whether there is memory for the block; its arrays are then set. */
static int make_room(const Attend *a, Block *b, int widens)
{
    b->width = padded(a->width), b->value_width = padded(a->value_width);
    i64 rows = b->tiles * ROWS, copy = 0;
    if (b->width != a->width || b->value_width != a->value_width || (a->value_at && b->tiles >= COPY_FROM)) copy = KEYS;
    i64 wide = !widens ? 0 : KEYS * (b->width + (a->value_at ? b->value_width : 0));
    i64 floats = rows * (16 + b->width + b->value_width + KEYS + 1) + copy * (b->width + b->value_width) + wide + 16;
    i64 bytes = (floats * 4 + rows * 16 + 63) / 64 * 64;
    if (attend_room.bytes < bytes) {
        free(attend_room.at);
        attend_room.at = aligned_alloc(64, bytes);
        attend_room.bytes = attend_room.at ? bytes : 0;
        if (!attend_room.at) return 0;
    }
    b->sum = (float *)attend_room.at;
    b->q = b->sum + rows * 16;
    b->acc = b->q + rows * b->width;
    b->p = b->acc + rows * b->value_width;
    b->turned = copy ? b->p + rows * KEYS : 0;
    b->values = b->p + rows * KEYS + copy * b->width;
    b->wide = wide ? b->values + copy * b->value_width : 0;
    b->seen = (i64 *)(b->values + copy * b->value_width + wide);
    b->from = b->seen + rows;
    b->most = (float *)(b->from + rows);
    for (i64 start = 0; start < copy; start += TURNED) /* what turn4 leaves as it is */
        memset(b->turned + start * b->width + a->width * TURNED, 0, (b->width - a->width) * TURNED * 4);
    return 1;
}

/* Returns token of a block's row: rows go through the query heads of one token after the other. */
typedef struct {
    i64 token, head; /* of the batch; of its key/value head's group */
} Row;
INLINE Row find_row(const Attend *a, i64 seq, i64 row)
{
    return (Row){a->query_starts[seq] + row / a->group, row % a->group};
}

static void take_queries(const Job *job, Block *b, i64 seq, i64 head, i64 first)
{
    const Attend *a = job->step;
    float *q = b->q, scale = (float)a->scale;
    for (i64 r = 0; r < b->tiles * ROWS; r++, q += b->width) {
        Row at = find_row(a, seq, first + least(r, b->rows - 1));
        float sink = job->sinks ? job->sinks[head * a->group + at.head] : -INFINITY;
        b->seen[r] = a->positions[at.token] + 1, b->from[r] = job->window ? from_tile(b->seen[r], job->window) : 0;
        if (job->chunk) b->from[r] = a->positions[at.token] / job->chunk * job->chunk;
        b->most[r] = sink;
        memset(b->sum + r * 16, 0, 64);
        if (sink > -INFINITY) b->sum[r * 16] = 1;
        memset(b->acc + r * b->value_width, 0, b->value_width * 4);
        const float *from = job->q + at.token * job->q_step + (head * a->group + at.head) * a->width;
        if (r >= b->rows) memset(q, 0, b->width * 4);
        else BY_REGISTER(a->width, put(q + i, j, get(from + i, j, count) * scale, 16);)
    }
}

static void write_rows(const Job *job, const Block *b, i64 seq, i64 head, i64 first)
{
    const Attend *a = job->step;
    for (i64 r = 0; r < b->rows; r++) {
        Row at = find_row(a, seq, first + r);
        const float *acc = b->acc + r * b->value_width;
        float *out = job->out + ((at.token * a->heads + head) * a->group + at.head) * a->value_width;
        float by = 1 / sum16((const vf *)(b->sum + r * 16));
        BY_REGISTER(a->value_width, put(out + i, j, get(acc + i, j, 16) * by, count);)
    }
}

static void attend_piece(const void *about, i64 piece)
{
    const Job *job = about;
    const Attend *a = job->step;
    piece = a->piece_starts[a->num_seqs] - 1 - piece; /* the last blocks of the longest chunks take longest: first */
    i64 seq = 0, end = a->num_seqs;
    while (end - seq > 1) {
        i64 middle = (seq + end) / 2;
        *(a->piece_starts[middle] <= piece ? &seq : &end) = middle;
    }
    i64 blocks = (a->piece_starts[seq + 1] - a->piece_starts[seq]) / a->heads;
    piece -= a->piece_starts[seq];
    i64 head = piece / blocks, block = piece % blocks;
    i64 rows = (a->query_starts[seq + 1] - a->query_starts[seq]) * a->group, tiles = (rows + ROWS - 1) / ROWS;
    i64 first = tiles * block / blocks * ROWS;
    Block b = {.tiles = tiles * (block + 1) / blocks - first / ROWS};
    b.rows = least(b.tiles * ROWS, rows - first);
    if (!make_room(a, &b, job->form.kind != FLOAT32)) {
        atomic_store(job->failed, 1);
        return;
    }
    take_queries(job, &b, seq, head, first);
    attend_block(job, &b, seq, head);
    write_rows(job, &b, seq, head, first);
}

/* Cuts the step into pieces. Returns their number, or -1 where a position lies behind its row of the block table. */
i64 attend_plan(Attend *a)
{
    i64 row_bytes = (padded(a->width) + padded(a->value_width) + KEYS + 32) * 4;
    i64 most = ROOM / row_bytes / ROWS > 2 ? ROOM / row_bytes / ROWS : 2; /* tiles of a block */
    i64 wanted = a->num_seqs ? (2 * pool_threads() + a->num_seqs * a->heads - 1) / (a->num_seqs * a->heads) : 0;
    a->piece_starts[0] = 0;
    for (i64 seq = 0; seq < a->num_seqs; seq++) {
        i64 start = a->query_starts[seq], end = a->query_starts[seq + 1];
        if (start < 0 || end < start || end > a->num_rows) return -1;
        for (i64 t = start; t < end; t++)
            if (a->positions[t] < 0 || a->positions[t] >= a->table_width * a->block_size) return -1;
        i64 tiles = ((end - start) * a->group + ROWS - 1) / ROWS, blocks = (tiles + most - 1) / most;
        if (blocks < wanted && pool_threads() > 1) blocks = least(wanted, tiles);
        a->piece_starts[seq + 1] = a->piece_starts[seq] + a->heads * blocks;
    }
    return a->query_starts[0] || a->query_starts[a->num_seqs] != a->num_rows ? -1 : a->piece_starts[a->num_seqs];
}

/* steps: of each shape of the model's layers, this one's at `shape`; q: [T, heads, group, width] with q_step floats from
   token to token; out: [T, heads, group, value_width]; window, sinks and chunk as in Job; form of the cache. Returns -1
   where there is no memory to work in. */
i64 attend(const Attend *steps, i64 shape, const float *q, i64 q_step, const float *cache, float *out, i64 window,
           const float *sinks, i64 chunk, const CachedForm *form)
{
    const Attend *step = steps + shape;
    _Atomic i64 failed = 0;
    Job job = {step, q, q_step, cache, out, window, sinks, chunk, *form, &failed};
    pool_run(attend_piece, &job, step->piece_starts[step->num_seqs]);
    return failed ? -1 : 0;
}
